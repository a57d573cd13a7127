"""The host updater: host cores that run AdamW over chunks in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from torch import Tensor

from outcore.optim.updates import ChunkUpdate, UpdateQueue
from outcore.stream.lanes import Lane, injected_delay


class HostUpdater:
    """One thread; the kernel itself spreads over the cores and holds no lock on the interpreter."""

    def __init__(self, queue: UpdateQueue, *, refresh: Lane) -> None:
        """``refresh``: the lane that brings new weights to units that are resident."""
        self._queue = queue
        self._refresh = refresh
        self._thread = threading.Thread(target=self._run, name="outcore-host-adamw", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (update := self._queue.take(reserved=False, others=True)) is not None:
            try:
                self._update(update)
            except BaseException as error:
                update.fail(error)
            del update  # hold no tensor while idle

    def _update(self, update: ChunkUpdate) -> None:
        for fence in update.after:
            fence.block()
        injected_delay()
        update.apply(update.home_tensors(), update.gradient())
        update.gradient_read(None)
        resident = update.chunk.unit.device_weight
        if resident is None:
            update.done.mark_issued()
            return
        target = resident[update.chunk.start : update.chunk.end]
        source = update.state.weight[update.chunk.start : update.chunk.end]
        self._refresh.submit(_copy(target, source), after=update.after, fence=update.done)


def _copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    return partial(_copy_now, target, source)


def _copy_now(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
