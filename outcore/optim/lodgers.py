"""Lodgers: chunks whose optimizer state stays on the device between steps.

The forward begins with the embedding and the first block, whose gradients are the last of a
backward: their updates cannot hide behind anything. Where the device budget has room, their state
lodges on the device and is updated there at once, without the link or the host's cores; so does
that of further blocks where room is left over. Its home
stays the host: ``bring_home`` brings it up to date there before anyone reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.optim.state import UnitState
from outcore.optim.updates import Chunk, ChunkUpdate
from outcore.stream.lanes import Fence, Lane
from outcore.stream.unit import Unit

Scheduled = tuple[Chunk, UnitState]


@dataclass(kw_only=True, eq=False)
class _Lodger:
    """One chunk's state and gradient on the device, beside its home."""

    chunk: Chunk
    home: list[Tensor]
    tensors: list[Tensor]  # weight first: the unit's own where that is resident
    gradient: Tensor
    generation: int = -1  # of the home that it was read from
    is_ahead: bool = False  # of its home
    last_update: Fence | None = None

    @property
    def is_resident(self) -> bool:
        return self.chunk.unit.device_weight is not None


def lodger_bytes(chunk: Chunk, state: UnitState, gradient_dtype: torch.dtype) -> int:
    """Return the device bytes that the chunk's lodging takes."""
    num_bytes = state.format.num_bytes(chunk.numel) + chunk.numel * gradient_dtype.itemsize
    if chunk.unit.device_weight is None:
        num_bytes += chunk.numel * state.weight.itemsize
    return num_bytes


def urgent_chunks(schedule: Sequence[Scheduled]) -> int:
    """Return how many chunks of a schedule the forward waits for at its start."""
    return sum(chunk.unit.is_urgent for chunk, _ in schedule)


def fitting_lodgers(
    sizes: Sequence[int], *, num_urgent: int, room_bytes: int, unwanted_bytes: int
) -> int:
    """Return how many of the chunks, of these bytes, find a lodging.

    The urgent ones, or the first if none is, take what room there is; those that follow only what
    nobody else wants.
    """
    taken = 0
    for index, num_bytes in enumerate(sizes):
        taken += num_bytes
        if taken > (room_bytes if index < max(1, num_urgent) else unwanted_bytes):
            return index
    return len(sizes)


class Lodgers:
    """Updates lodged chunks on one lane, in the order of submission."""

    def __init__(
        self,
        lodged: Sequence[Scheduled],
        last_updates: Sequence[Sequence[Fence]],
        *,
        device: torch.device,
        gradient_dtype: torch.dtype,
    ) -> None:
        """``last_updates``: what to wait for before each chunk's home is read."""
        self.num_updated = 0  # elements, since the start
        self._generation = 0
        self._lodgers: dict[tuple[int, int], _Lodger] = {}
        for chunk, state in lodged:
            home = state.cut(chunk.start, chunk.end)
            tensors = [torch.empty_like(tensor, device=device) for tensor in home[1:]]
            weight = (
                torch.empty_like(home[0], device=device)
                if chunk.unit.device_weight is None
                else chunk.unit.device_weight[chunk.start : chunk.end]
            )
            self._lodgers[chunk.key] = _Lodger(
                chunk=chunk,
                home=home,
                tensors=[weight, *tensors],
                gradient=torch.empty(chunk.numel, dtype=gradient_dtype, device=device),
            )
        # Their memory may still be in use under its last owner, on the compute stream.
        allocated = Fence.after_compute(device)
        self._lane = Lane("lodged-state", device, hardware="compute")
        for lodger, last_update in zip(self._lodgers.values(), last_updates, strict=True):
            self._move_in(lodger, after=[allocated, *last_update])

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.key in self._lodgers

    def gradient_buffer(self, chunk: Chunk) -> tuple[Tensor, list[Fence]] | None:
        """Return where a lodged chunk's gradient may be put, and after what; None if not lodged.

        The gradient then need not go to the host and back.
        """
        lodger = self._lodgers.get(chunk.key)
        if lodger is None:
            return None
        return lodger.gradient, [] if lodger.last_update is None else [lodger.last_update]

    def update(self, update: ChunkUpdate) -> None:
        """Queue the update of a lodged chunk; it waits for its gradient on the device."""
        lodger = self._lodgers[update.chunk.key]
        update.done = update.weight_ready
        lodger.last_update = update.weight_ready
        if lodger.generation != self._generation:
            self._move_in(lodger, after=())

        def bring_gradient_and_update() -> None:
            arrived = update.gradient()
            if arrived.data_ptr() != lodger.gradient.data_ptr():
                lodger.gradient.copy_(arrived, non_blocking=True)
            update.apply(lodger.tensors, lodger.gradient)
            if not lodger.is_resident:
                lodger.home[0].copy_(lodger.tensors[0], non_blocking=True)

        lodger.is_ahead = True
        self._lane.submit(
            bring_gradient_and_update,
            after=update.after,
            fence=update.weight_ready,
            label=update.label,
        )
        update.gradient_read(update.weight_ready)
        self.num_updated += lodger.chunk.numel

    def bring_home(self) -> None:
        """Wait for every update, and copy to the homes what is newer here."""
        fences = []
        for lodger in self._lodgers.values():
            if lodger.last_update is not None:
                fences.append(lodger.last_update)
            if lodger.is_ahead:
                fences.append(self._go_home(lodger))
        for fence in fences:
            fence.block()

    def send_home(self, unit: Unit) -> list[Fence]:
        """Start to copy what is newer here to a unit's home; return when it will be there."""
        return [
            self._go_home(lodger)
            for lodger in self._lodgers.values()
            if lodger.chunk.unit is unit and lodger.is_ahead
        ]

    def forget(self) -> None:
        """Say that homes were written from outside; what lodges here must be read again."""
        self._generation += 1
        for lodger in self._lodgers.values():
            lodger.is_ahead = False

    def close(self) -> None:
        self._lane.close()

    def _move_in(self, lodger: _Lodger, after: Sequence[Fence]) -> None:
        def copy() -> None:
            # A resident weight is there already, and newer than its home.
            first = 1 if lodger.is_resident else 0
            for here, home in zip(lodger.tensors[first:], lodger.home[first:], strict=True):
                here.copy_(home, non_blocking=True)

        lodger.generation = self._generation
        self._lane.submit(copy, after=after)

    def _go_home(self, lodger: _Lodger) -> Fence:
        def copy() -> None:
            # A streamed weight went home with its update.
            first = 0 if lodger.is_resident else 1
            for here, home in zip(lodger.tensors[first:], lodger.home[first:], strict=True):
                home.copy_(here, non_blocking=True)

        lodger.is_ahead = False
        return self._lane.submit(copy)
