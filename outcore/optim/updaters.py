"""Who updates a chunk: the device, the host, or a pipeline through the disk, by its state's home.

Owns the queue and the threads of the updaters. When an update may begin, and who waits for it, is
the backend's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outcore.errors import OutcoreError
from outcore.optim.device_state import DeviceRoom, DeviceState
from outcore.optim.disk_updater import DiskUpdater
from outcore.optim.host_updater import HostUpdater
from outcore.optim.spare_gradients import SpareGradients
from outcore.optim.state import UnitState
from outcore.optim.updates import Chunk, ChunkUpdate, UpdateQueue
from outcore.stream.lanes import Fence, Lane
from outcore.stream.unit import Unit


class Updaters:
    """Takes updates, each for the one who does it."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        states: dict[int, UnitState],
        *,
        device: torch.device,
        gradient_dtype: torch.dtype,
        num_visits: int | None,
        room: DeviceRoom,
        refresh: Lane,
        spare: SpareGradients | None = None,
    ) -> None:
        """``refresh`` brings new weights to where they are resident.

        ``spare``: memory that state on disk may wait in, until it is written.
        """
        self._device = device
        self._queue: UpdateQueue | None = None
        self._host: HostUpdater | None = None
        self._disk: DiskUpdater | None = None
        self.device_state: DeviceState | None = None
        if any(chunk.unit.is_on_disk for chunk in chunks):
            self._disk = DiskUpdater(refresh=refresh, spare=spare)
        on_queue = [
            (chunk, states[chunk.unit.index])
            for chunk in chunks
            if chunk.unit.state_home == "host" and not chunk.unit.is_on_disk
        ]
        if on_queue:
            self._queue = UpdateQueue()
            self._host = HostUpdater(self._queue, refresh=refresh)
            self.device_state = DeviceState(
                self._queue,
                on_queue,
                num_visits=num_visits,
                device=device,
                gradient_dtype=gradient_dtype,
                room=room,
            )

    def hand_over(self, left: list[ChunkUpdate]) -> None:
        """Give each update to its updater; those that have none yet stay in ``left``."""
        on_host, on_disk = [], []
        for update in list(left):
            unit = update.chunk.unit
            if unit.state_home == "device":
                self._update_on_device(update)
            elif unit.is_on_disk:
                on_disk.append(update)
                continue
            elif self.device_state is None or not self.device_state.update(update):
                on_host.append(update)
                continue
            left.remove(update)
        if on_disk:  # all at once: what is said of the last ones is known then
            assert self._disk is not None
            self._disk.push(on_disk)
            left[:] = on_host
        if on_host:
            assert self._queue is not None
            self._queue.push(on_host)
            left.clear()

    def _update_on_device(self, update: ChunkUpdate) -> None:
        """Run an update whose state is on the device, in the order of the compute stream."""
        for fence in update.after:
            fence.before_compute()
        home, *rest = update.home_tensors()
        if home.device == self._device:
            update.apply([home, *rest], update.gradient())
        else:
            visiting = home.to(self._device, non_blocking=True)
            update.apply([visiting, *rest], update.gradient())
            home.copy_(visiting, non_blocking=True)
        for fence in (update.weight_ready, update.done):
            fence.event = Fence.after_compute(self._device).event
            fence.mark_issued()

    # --- state that is on the device for a while --------------------------------------------------

    def gradient_buffer(self, chunk: Chunk) -> tuple[Tensor, list[Fence]] | None:
        """Return the place on the device where a chunk's gradient is wanted, if it has one."""
        return None if self.device_state is None else self.device_state.gradient_buffer(chunk)

    def settle_once(self) -> None:
        """Bring state to the device as far as it has room, after a first whole step."""
        if self.device_state is not None:
            self.device_state.settle_once()

    def send_home(self, unit: Unit) -> list[Fence]:
        """Have a unit's state copied home; return what to wait for."""
        return [] if self.device_state is None else self.device_state.send_home(unit)

    def homes_written(self) -> None:
        """Say that what is on the device is no longer what its home has."""
        if self.device_state is not None:
            self.device_state.homes_written()

    # --- what was done, and the end ---------------------------------------------------------------

    @property
    def num_updated(self) -> dict[str, int]:
        """Elements updated so far, by updater."""
        on_device = {"visiting": 0, "lodged": 0}
        if self.device_state is not None:
            on_device = self.device_state.num_updated
        return {
            "host": self._host.num_updated if self._host is not None else 0,
            **on_device,
            "disk": self._disk.num_updated if self._disk is not None else 0,
        }

    @property
    def num_visits(self) -> int:
        """Chunks that have buffers on the device."""
        return self.device_state.num_visits if self.device_state is not None else 0

    @property
    def host_busy_s(self) -> float:
        """Seconds that the host's cores have spent updating."""
        return self._host.busy_s if self._host is not None else 0.0

    def synchronize(self) -> None:
        """Wait for every update, and bring all state home."""
        if self._queue is not None:
            self._queue.synchronize()
        if self._disk is not None:
            self._disk.synchronize()
        if self.device_state is not None:
            self.device_state.bring_home()

    def close(self) -> None:
        """Take no more; updates that nobody took fail with a clear error."""
        if self._queue is not None:
            for update in self._queue.close():
                update.fail(OutcoreError("the optimizer was closed before this update"))
        if self._disk is not None:
            self._disk.close()

    def join(self) -> None:
        """Wait for the threads to end, once no lane is left that they could wait for."""
        if self._host is not None:
            self._host.join()
        if self.device_state is not None:
            self.device_state.close()
