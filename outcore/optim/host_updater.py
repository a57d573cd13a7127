"""The host updater: host cores that run AdamW over chunks in host memory."""

from __future__ import annotations

import threading
import time

from outcore.optim.updates import ChunkUpdate, UpdateQueue
from outcore.stream.lanes import Lane, injected_delay
from outcore.stream.recording import recorded


class HostUpdater:
    """One thread; the kernel itself spreads over the cores and holds no lock on the interpreter."""

    def __init__(self, queue: UpdateQueue, *, refresh: Lane) -> None:
        """``refresh``: the lane that brings new weights to units that are resident."""
        self.num_updated = 0  # elements, since the start
        self.busy_s = 0.0  # inside the kernel
        self._queue = queue
        self._refresh = refresh
        self._thread = threading.Thread(target=self._run, name="outcore-host-adamw", daemon=True)
        self._thread.start()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        try:
            while (update := self._queue.take(min_backlog=0)) is not None:
                try:
                    self._update(update)
                except BaseException as error:
                    update.fail(error)
                del update  # hold no tensor while idle
        except BaseException as error:  # take() asks events, which raise after a CUDA error
            self._queue.break_off(error)

    def _update(self, update: ChunkUpdate) -> None:
        for fence in update.after:
            fence.block()
        injected_delay()
        start = time.perf_counter()
        with recorded("host cores", update.label):
            update.apply(update.home_tensors(), update.gradient())
        self.busy_s += time.perf_counter() - start
        update.gradient_read(None)
        update.done.mark_issued()
        self.num_updated += update.chunk.numel
        resident = update.chunk.unit.device_weight
        if resident is None:
            update.weight_ready.mark_issued()
            return
        target = resident[update.chunk.start : update.chunk.end]
        source = update.state.weight[update.chunk.start : update.chunk.end]

        def refresh() -> None:
            target.copy_(source, non_blocking=True)

        self._refresh.submit(refresh, after=update.after, fence=update.weight_ready)
