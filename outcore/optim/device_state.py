"""State that comes to the device beside its home: chunks that lodge there, and those that visit.

It comes after a first whole step, when the device's peak is known, and only as far as there is
room: it saves time, and nothing needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.optim.lodgers import (
    Lodgers,
    Scheduled,
    fitting_lodgers,
    lodger_bytes,
    urgent_chunks,
)
from outcore.optim.updates import Chunk, ChunkUpdate, UpdateQueue
from outcore.optim.visitor import Visitor, visit_bytes
from outcore.store.ledger import Hold, Ledger
from outcore.stream.lanes import Fence
from outcore.stream.unit import Unit

NUM_HELPING = 2  # one visit comes while the other goes
DEVICE_STATE = ("lodged state", "state visits")  # purposes in the device's books


@dataclass(frozen=True, kw_only=True)
class DeviceRoom:
    """What the device has left, asked when state comes to stay there."""

    ledger: Ledger
    spare_bytes: Callable[[], int]
    wanted_bytes: Callable[[], int]  # of the spare ones, by others
    before_settling: Callable[[], None]  # called before state takes any of them


class DeviceState:
    """Lodgers and visits of one model, whose state has its home on the host."""

    def __init__(
        self,
        queue: UpdateQueue,
        schedule: Sequence[Scheduled],
        *,
        num_visits: int | None,
        device: torch.device,
        gradient_dtype: torch.dtype,
        room: DeviceRoom,
    ) -> None:
        """``schedule``: all chunks with state on the host, in the order of the forward.

        ``num_visits``: those with buffers on the device; None: as many as help and fit.
        """
        self.num_visits = 0
        self.lodgers: Lodgers | None = None
        self._visitor: Visitor | None = None
        self._queue = queue
        self._schedule = schedule
        self._wanted_visits = num_visits
        self._device = device
        self._gradient_dtype = gradient_dtype
        self._room = room
        self._has_settled = False
        self._holds: list[Hold] = []

    def settle_once(self) -> None:
        """Bring state to the device, the first time that this is called.

        OutOfBudget if the caller asked for more of it than fits; nothing has changed then.
        """
        if self._has_settled:
            return
        self._has_settled = True
        self._room.before_settling()
        num_visits = self._wanted_visits
        if num_visits is None:
            num_visits = self._fitting_visits()
        if num_visits == 0:
            return
        # An explicit number may ask for more than the schedule has; the rest would stay empty.
        num_helping = min(NUM_HELPING, num_visits - 1)
        lodged = self._schedule[: num_visits - num_helping]
        sizes = self._bytes_of(lodged, num_helping)
        remedy = "Use a larger device_memory or fewer visits."
        self._holds = [  # all of them or none: the first goes if the second is refused
            self._room.ledger.hold(purpose, num_bytes, remedy=remedy)
            for purpose, num_bytes in zip(DEVICE_STATE, sizes, strict=True)
        ]
        try:
            self._settle(lodged, num_helping)
        except torch.OutOfMemoryError:  # fragments
            if self.lodgers is not None:
                self.lodgers.close()  # its copies must land before their memory is used again
            self.lodgers = None
            for hold in self._holds:
                hold.give_back()
            return
        self.num_visits = len(lodged) + num_helping

    def gradient_buffer(self, chunk: Chunk) -> tuple[Tensor, list[Fence]] | None:
        """Return where a chunk's gradient may be put, and after what; None if it does not lodge."""
        return self.lodgers.gradient_buffer(chunk) if self.lodgers is not None else None

    def update(self, update: ChunkUpdate) -> bool:
        """Take the update of a chunk that lodges here; False for any other."""
        if self.lodgers is None or update.chunk not in self.lodgers:
            return False
        self.lodgers.update(update)
        return True

    def send_home(self, unit: Unit) -> list[Fence]:
        """Start to copy what is newer here to a unit's home; return when it will be there."""
        return self.lodgers.send_home(unit) if self.lodgers is not None else []

    def bring_home(self) -> None:
        """Wait for every update of a lodger, and copy to the homes what is newer here."""
        if self.lodgers is not None:
            self.lodgers.bring_home()

    def homes_written(self) -> None:
        """Say that homes were written from outside: copies here are stale."""
        if self.lodgers is not None:
            self.lodgers.forget()

    @property
    def num_updated(self) -> dict[str, int]:
        """Elements updated here so far."""
        return {
            "visiting": self._visitor.num_updated if self._visitor is not None else 0,
            "lodged": self.lodgers.num_updated if self.lodgers is not None else 0,
        }

    def close(self) -> None:
        """End every thread; the queue was closed before."""
        if self._visitor is not None:
            self._visitor.join()
        if self.lodgers is not None:
            self.lodgers.close()

    def _settle(self, lodged: Sequence[Scheduled], num_helping: int) -> None:
        last_updates = [self._queue.last_update(chunk) for chunk, _ in lodged]
        dtype = self._gradient_dtype
        self.lodgers = Lodgers(lodged, last_updates, device=self._device, gradient_dtype=dtype)
        if num_helping:
            chunk, state = self._largest
            self._visitor = Visitor(
                self._queue,
                num_visits=num_helping,
                like=state,
                numel=chunk.numel,
                device=self._device,
                gradient_dtype=dtype,
            )

    def _fitting_visits(self) -> int:
        """Return how many chunks get buffers: to help the host, then for all that is urgent.

        What nobody else wants of the device is for as much of the rest as it holds.
        """
        if self._device.type != "cuda" or not self._schedule:
            return 0
        room = self._room.spare_bytes() - sum(self._bytes_of((), NUM_HELPING))
        num_lodged = fitting_lodgers(
            [lodger_bytes(c, s, self._gradient_dtype) for c, s in self._schedule],
            num_urgent=urgent_chunks(self._schedule),
            room_bytes=room,
            unwanted_bytes=room - self._room.wanted_bytes(),
        )
        return num_lodged + NUM_HELPING if num_lodged else 0

    def _bytes_of(self, lodged: Sequence[Scheduled], num_helping: int) -> tuple[int, int]:
        """Return the bytes of each purpose of DEVICE_STATE."""
        dtype, (chunk, state) = self._gradient_dtype, self._largest
        each = visit_bytes(state, chunk.numel, dtype)
        return sum(lodger_bytes(c, s, dtype) for c, s in lodged), num_helping * each

    @property
    def _largest(self) -> Scheduled:
        return max(self._schedule, key=lambda scheduled: scheduled[0].numel)
