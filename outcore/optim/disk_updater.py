"""The disk updater: chunks whose weights or state live on disk are read, updated and written back.

Reads of the next chunks run while this one is updated and earlier ones are written: one thread
conducts, the lanes of the files and the host's cores do the work.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outcore.errors import OutcoreError
from outcore.optim.updates import ChunkUpdate
from outcore.stream import disk_tensors
from outcore.stream.disk_lanes import NUM_LANES
from outcore.stream.disk_tensors import DiskTensor
from outcore.stream.lanes import Fence, Lane, injected_delay
from outcore.stream.recording import recorded

NUM_AHEAD = NUM_LANES + 1  # chunks that are read ahead of the one that is updated

Fetched = tuple[DiskTensor, Tensor, Fence]
"""A tensor, its piece in staging, and the fence behind which that holds it."""


NUM_STAGED = NUM_AHEAD + 1 + NUM_LANES  # chunks that are read ahead, updated and written
# Of the weights' file: for updates, and for copies to the device.
NUM_STAGED_WEIGHTS = NUM_STAGED + 2 * disk_tensors.NUM_AHEAD


@dataclass(kw_only=True, eq=False)
class _Staged:
    """An update whose tensors are on their way from disk."""

    update: ChunkUpdate
    piece: int
    tensors: list[Tensor]  # UnitState.tensors() cut to the chunk; those on disk are in staging
    fetched: list[Fetched]


class DiskUpdater:
    """Takes updates in the order of submission."""

    def __init__(self, *, refresh: Lane) -> None:
        """``refresh``: the lane that brings new weights to units that are resident."""
        self.num_updated = 0  # elements, since the start
        self._refresh = refresh
        # They only wait: for weights to be on disk, and for all of an update.
        self._weights_written = Lane("disk-weights-written")
        self._all_written = Lane("disk-all-written")
        self._queue: queue.SimpleQueue[ChunkUpdate | None] = queue.SimpleQueue()
        self._last: dict[tuple[int, int], Fence] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="outcore-disk-adamw", daemon=True)
        self._thread.start()

    def push(self, updates: Sequence[ChunkUpdate]) -> None:
        for update in updates:
            self._last[update.chunk.key] = update.done
            self._queue.put(update)

    def synchronize(self) -> None:
        """Wait until every update that was pushed is on disk."""
        for fence in list(self._last.values()):
            fence.block()

    def close(self) -> None:
        """Finish what was begun, fail what waits, and end the thread."""
        self._is_closing = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        self._weights_written.close()
        self._all_written.close()

    def _run(self) -> None:
        ahead: deque[_Staged] = deque()
        upcoming: ChunkUpdate | None = None  # taken from the queue, not staged yet
        while True:
            while len(ahead) <= NUM_AHEAD:
                try:
                    upcoming = upcoming or self._queue.get(block=not ahead)
                except queue.Empty:
                    break
                if upcoming is None or self._is_closing:
                    self._give_up(ahead, upcoming)
                    return
                if any(staged.update.chunk.key == upcoming.chunk.key for staged in ahead):
                    break  # two updates of one chunk keep their order
                try:
                    ahead.append(_stage(upcoming))
                except BaseException as error:
                    upcoming.fail(error)
                upcoming = None  # hold no tensor while idle
            if self._is_closing:
                self._give_up(ahead, upcoming)
                return
            if ahead:
                self._run_one(ahead.popleft())

    def _give_up(self, ahead: deque[_Staged], upcoming: ChunkUpdate | None) -> None:
        error = OutcoreError("the optimizer was closed before this update")
        for staged in ahead:
            _release(staged.fetched)
            staged.update.fail(error)
        if upcoming is not None:
            upcoming.fail(error)
        while not self._queue.empty():
            update = self._queue.get()
            if update is not None:
                update.fail(error)

    def _run_one(self, staged: _Staged) -> None:
        update = staged.update
        try:
            for fence in update.after:
                fence.block()
            for _, _, here in staged.fetched:
                here.block()
            injected_delay()
            with recorded("host cores", update.label):
                update.apply(staged.tensors, update.gradient())
        except BaseException as error:
            _release(staged.fetched)
            update.fail(error)
            return
        update.gradient_read(None)
        self.num_updated += update.chunk.numel
        try:
            self._write_back(staged)
        except BaseException as error:  # the lanes were closed: this thread must not end here
            update.fail(error)

    def _write_back(self, staged: _Staged) -> None:
        update, chunk, weight = staged.update, staged.update.chunk, staged.tensors[0]
        resident, read_by = chunk.unit.device_weight, []
        if resident is not None:
            target = resident[chunk.start : chunk.end]
            read_by = [
                self._refresh.submit(
                    lambda: _copy(target, weight), after=update.after, fence=update.weight_ready
                )
            ]
        stores = []
        values_of = {tensor: values for tensor, values, _ in staged.fetched}
        files = disk_tensors.files_of(list(values_of))
        done = update.done if len(files) == 1 else None  # one write is all of it
        for tensors in files:
            sources = [(tensor, values_of[tensor]) for tensor in tensors]
            is_read = any(values.data_ptr() == weight.data_ptr() for _, values in sources)
            after = read_by if is_read else []
            stores.append(disk_tensors.store_together(sources, staged.piece, after, done))
            if chunk.unit.disk_weight in tensors:
                self._weights_written.submit(_nothing, after=stores[-1:], fence=update.weight_ready)
        if resident is None and chunk.unit.disk_weight is None:
            update.weight_ready.mark_issued()
        if done is None:
            self._all_written.submit(_nothing, after=stores, fence=update.done)


def _stage(update: ChunkUpdate) -> _Staged:
    """Start to read what is on disk of an update's tensors."""
    chunk = update.chunk
    piece, offset = divmod(
        chunk.start, chunk.unit.piece_numel(update.state.format.max_piece_elements)
    )
    assert offset == 0, "a chunk is one piece"
    tensors = update.home_tensors()
    on_disk = update.state.on_disk
    fetched: list[Fetched] = []
    try:
        for of_file in disk_tensors.files_of([tensor for tensor in on_disk if tensor is not None]):
            pieces = disk_tensors.fetch_together(of_file, piece)
            for tensor, (values, here) in zip(of_file, pieces, strict=True):
                tensors[on_disk.index(tensor)] = values
                fetched.append((tensor, values, here))
    except BaseException:
        _release(fetched)
        raise
    # A piece of weights may have frozen ones behind.
    tensors = update.state.format.cut(tensors, 0, chunk.numel)
    return _Staged(update=update, piece=piece, tensors=tensors, fetched=fetched)


def _release(fetched: Sequence[Fetched]) -> None:
    for tensor, values, _ in fetched:
        tensor.release(values, [])


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _nothing() -> None:
    pass
