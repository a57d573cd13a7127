"""The disk updater: chunks whose weights or state live on disk are read, updated and written back.

Reads of the next chunks run while this one is updated and earlier ones are written: one thread
conducts, the lanes of the files and the host's cores do the work.

A step's last chunks are set aside, in memory that gradients have left, and written when all are
read: the forward waits for reads alone then, and the disk writes while the backward runs. They are
read into staging like all others, because reading into memory that no cache holds is half as fast.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outcore.errors import LaneError, OutcoreError
from outcore.optim.rest_of_disk import RestOfDisk
from outcore.optim.spare_gradients import SpareGradients
from outcore.optim.updates import ChunkUpdate
from outcore.stream import disk_tensors
from outcore.stream.disk_lanes import NUM_LANES
from outcore.stream.disk_tensors import DiskTensor
from outcore.stream.lanes import Fence, Lane, injected_delay
from outcore.stream.recording import recorded
from outcore.stream.staging import Guest

NUM_AHEAD = NUM_LANES + 1  # chunks that are read ahead of the one that is updated

Fetched = tuple[DiskTensor, Tensor, Fence]
"""A tensor, its piece in staging, and the fence behind which that holds it."""


NUM_STAGED = NUM_AHEAD + 1 + NUM_LANES  # chunks that are read ahead, updated and written
# Of the weights' file: for updates, and for copies to the device.
NUM_STAGED_WEIGHTS = NUM_STAGED + 2 * disk_tensors.NUM_AHEAD


@dataclass(frozen=True, kw_only=True)
class _Pushed:
    """An update, and how many of those that were pushed with it are left, itself among them."""

    update: ChunkUpdate
    push: int  # a number for all that were pushed together
    num_left: int


@dataclass(kw_only=True, eq=False)
class _Staged:
    """An update whose tensors are on their way from disk."""

    update: ChunkUpdate
    push: int
    guest: Guest | None  # memory that is lent to it, to wait in until it is written
    piece: int
    tensors: list[Tensor]  # UnitState.tensors() cut to the chunk; those on disk are in staging
    fetched: list[Fetched]

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for _, values, _ in self.fetched)


class DiskUpdater:
    """Takes updates in the order of submission."""

    def __init__(self, *, refresh: Lane, spare: SpareGradients | None = None) -> None:
        """``refresh``: the lane that brings new weights to units that are resident.

        ``spare``: lends memory for the last chunks of a step.
        """
        self.num_updated = 0  # elements, since the start
        self._refresh = refresh
        self._spare = spare
        self._held: list[_Staged] = []  # updated, in memory that is lent, and not written yet
        self._borrows = False  # for the rest of what was pushed together
        self._rest = RestOfDisk()
        self._num_pushes = 0
        # They only wait: for weights to be on disk, and for all of an update.
        self._weights_written = Lane("disk-weights-written")
        self._all_written = Lane("disk-all-written")
        self._queue: queue.SimpleQueue[_Pushed | None] = queue.SimpleQueue()
        self._last: dict[tuple[int, int], Fence] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="outcore-disk-adamw", daemon=True)
        self._thread.start()

    def push(self, updates: Sequence[ChunkUpdate]) -> None:
        self._rest.end()
        self._num_pushes += 1
        for i, update in enumerate(updates):
            self._last[update.chunk.key] = update.done
            self._queue.put(
                _Pushed(update=update, push=self._num_pushes, num_left=len(updates) - i)
            )

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
        upcoming: _Pushed | None = None  # taken from the queue, not staged yet
        while True:
            if not ahead:
                self._write_held()  # before it waits for what may wait for the memory
            while len(ahead) <= NUM_AHEAD:
                try:
                    upcoming = upcoming or self._queue.get(block=not ahead)
                except queue.Empty:
                    break
                if upcoming is None or self._is_closing:
                    self._give_up(ahead, upcoming)
                    return
                if ahead and not self._may_follow(upcoming, ahead):
                    break
                try:
                    ahead.append(self._stage(upcoming))
                except BaseException as error:
                    upcoming.update.fail(error)
                upcoming = None  # hold no tensor while idle
            if self._is_closing:
                self._give_up(ahead, upcoming)
                return
            if ahead:
                self._run_one(ahead.popleft())

    def _may_follow(self, upcoming: _Pushed, ahead: deque[_Staged]) -> bool:
        """Whether an update may be read for while others are not done."""
        if self._borrows and upcoming.push != ahead[-1].push:
            return False  # of the next step: what is held must be on its way to the disk before
        # Two updates of one chunk keep their order.
        return all(staged.update.chunk.key != upcoming.update.chunk.key for staged in ahead)

    def _stage(self, pushed: _Pushed) -> _Staged:
        """Start to read what is on disk of an update's tensors."""
        update, chunk = pushed.update, pushed.update.chunk
        piece, offset = divmod(
            chunk.start, chunk.unit.piece_numel(update.state.format.max_piece_elements)
        )
        assert offset == 0, "a chunk is one piece"
        tensors = update.home_tensors()
        on_disk = update.state.on_disk
        files = disk_tensors.files_of([tensor for tensor in on_disk if tensor is not None])
        guest = self._guest(pushed, files)
        fetched: list[Fetched] = []
        try:
            for of_file in files:
                pieces = disk_tensors.fetch_together(of_file, piece)
                for tensor, (values, here) in zip(of_file, pieces, strict=True):
                    tensors[on_disk.index(tensor)] = values
                    fetched.append((tensor, values, here))
        except BaseException:
            _release(fetched, guest)
            raise
        return _Staged(
            update=update,
            push=pushed.push,
            guest=guest,
            piece=piece,
            # A piece of weights may have frozen ones behind.
            tensors=update.state.format.cut(tensors, 0, chunk.numel),
            fetched=fetched,
        )

    def _guest(self, pushed: _Pushed, files: Sequence[list[DiskTensor]]) -> Guest | None:
        """Return lent memory for an update, from where on it suffices for all that are left.

        Only where the forward needs nothing that is on its way to the disk.
        """
        if self._spare is None or pushed.update.chunk.unit.weights_home != "host":
            return None
        (tensors,) = files
        each = disk_tensors.staged_bytes(tensors)
        # One at least: what the disk can do is learned from what it does.
        room = min(self._spare.free_bytes(), max(self._rest.limit_bytes, each))
        self._borrows = self._borrows or pushed.num_left * each <= room
        return self._spare.lend(each) if self._borrows else None

    def _write_held(self) -> None:
        """Write what was held back; what was lent last is wanted first."""
        held, self._held, self._borrows = self._held, [], False
        if not held:
            return
        self._rest.begin(sum(staged.num_bytes for staged in held))
        for staged in reversed(held):
            self._write_back(staged)
        done = [staged.update.done for staged in held]
        with contextlib.suppress(LaneError):  # closed
            self._all_written.submit(self._rest.written, after=done)

    def _give_up(self, ahead: deque[_Staged], upcoming: _Pushed | None) -> None:
        error = OutcoreError("the optimizer was closed before this update")
        self._write_held()
        for staged in ahead:
            _release(staged.fetched, staged.guest)
            staged.update.fail(error)
        if upcoming is not None:
            upcoming.update.fail(error)
        while not self._queue.empty():
            pushed = self._queue.get()
            if pushed is not None:
                pushed.update.fail(error)

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
            _release(staged.fetched, staged.guest)
            update.fail(error)
            del staged, update  # the error refers to this call
            return
        update.gradient_read(None)
        self.num_updated += update.chunk.numel
        if staged.guest is not None:
            update.weight_ready.mark_issued()
            self._hold(staged, staged.guest)
        else:
            self._write_back(staged)

    def _hold(self, staged: _Staged, guest: Guest) -> None:
        """Set the chunk aside until all are read."""
        sources = [(tensor, values) for tensor, values, _ in staged.fetched]
        try:
            with recorded("host cores", staged.update.label):
                aside = disk_tensors.set_aside(sources, staged.piece, guest)
        except BaseException as error:  # the lanes were closed
            staged.update.fail(error)
            guest.free.mark_issued()
            return
        staged.fetched = [
            (tensor, values, here)
            for (tensor, _, here), values in zip(staged.fetched, aside, strict=True)
        ]
        staged.tensors = []  # those in staging may be others' by now
        self._held.append(staged)

    def _write_back(self, staged: _Staged) -> None:
        try:
            self._submit_writes(staged)
        except BaseException as error:  # the lanes were closed: this thread must not end here
            staged.update.fail(error)
            if staged.guest is not None:
                staged.guest.free.mark_issued()

    def _submit_writes(self, staged: _Staged) -> None:
        update, chunk = staged.update, staged.update.chunk
        resident = chunk.unit.device_weight
        read_by: dict[int, Fence] = {}  # by the address of what is read
        if resident is not None:
            target, weight = resident[chunk.start : chunk.end], staged.tensors[0]
            read_by[weight.data_ptr()] = self._refresh.submit(
                lambda: _copy(target, weight), after=update.after, fence=update.weight_ready
            )
        stores = []
        values_of = {tensor: values for tensor, values, _ in staged.fetched}
        files = disk_tensors.files_of(list(values_of))
        done = update.done if len(files) == 1 else None  # one write is all of it
        for tensors in files:
            sources = [(tensor, values_of[tensor]) for tensor in tensors]
            addresses = [values.data_ptr() for _, values in sources]
            after = [read_by[address] for address in addresses if address in read_by]
            stores.append(disk_tensors.store_together(sources, staged.piece, after, done))
            if chunk.unit.disk_weight in tensors:
                self._weights_written.submit(_nothing, after=stores[-1:], fence=update.weight_ready)
        if resident is None and chunk.unit.disk_weight is None:
            update.weight_ready.mark_issued()
        if done is None:
            self._all_written.submit(_nothing, after=stores, fence=update.done)


def _release(fetched: Sequence[Fetched], guest: Guest | None) -> None:
    """Give back what an update that failed had: what was fetched, and memory it did not use."""
    for tensor, values, _ in fetched:
        with contextlib.suppress(LaneError):  # closed: there is nobody to give it back to
            tensor.release(values, [])
    if guest is not None:
        guest.free.mark_issued()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _nothing() -> None:
    pass
