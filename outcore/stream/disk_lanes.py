"""Records of a scratch file on their way through host memory: read, worked on, written back.

A few lanes that read and as many that write, each on one thread, over a fixed number of staging
buffers: records that follow each other are on their way at the same time, and the disk has the next
one's requests before the last of this one's are done. Every call returns at once; fences order the
rest. For each record the caller's order counts: a fetch gives what the last store before it stored.

    buffer, here = disk.fetch(record)
    done = cores.submit(lambda: work(buffer), after=[here])
    disk.store(record, buffer, after=[done])          # or disk.release(buffer, after=[done])

``fetch_all`` and ``store_all`` move several records as one piece of work.

No deadlock: a piece of work waits only for work that was submitted before it. Hence the two rules
for callers: the fences in ``after`` are of work that is submitted already, and buffers are given
back (``store`` or ``release``, which need not wait for the work) before more are fetched than there
are. A fetch that finds every buffer lent raises instead of waiting.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container, Sequence
from functools import partial

from torch import Tensor

from outcore.errors import LaneError
from outcore.store.scratch_file import Arrived, ScratchFile
from outcore.stream.lanes import Fence, Lane
from outcore.stream.staging import Guest, StagingPool

NUM_LANES = 6  # that read, and as many that write


class DiskLanes:
    """Moves records between ``file`` and the buffers of ``staging``."""

    def __init__(self, file: ScratchFile, staging: StagingPool) -> None:
        if staging.buffer_bytes < file.layout.largest_bytes:
            raise ValueError(
                f"staging buffers of {staging.buffer_bytes} bytes are too small for a record of "
                f"{file.layout.largest_bytes}"
            )
        self._file = file
        self._staging = staging
        self.reads = [Lane("disk-reads", hardware="disk read") for _ in range(NUM_LANES)]
        self.writes = [Lane("disk-writes", hardware="disk write") for _ in range(NUM_LANES)]
        self._arrivals: dict[int, Fence] = {}  # the read into each lent buffer, by its address
        self._stored: dict[int, Fence] = {}  # the last store of each record
        self._fetched: dict[int, list[Fence]] = {}  # fetches since that, which may be under way
        # The order of calls is the order in the lanes, and what keeps the fences free of circles.
        self._lock = threading.Lock()

    def fetch(self, record: int) -> tuple[Tensor, Fence]:
        """Start to read ``record``; return a buffer, and the fence behind which it holds it.

        The fence fails if the read does, or if the last store of the record did.
        """
        (buffer,), fence = self.fetch_all([record])
        return buffer, fence

    def fetch_all(
        self, records: Sequence[int], zeros: Container[int] = ()
    ) -> tuple[list[Tensor], Fence]:
        """Start to read ``records``; return a buffer for each, and one fence for all.

        ``zeros``: those that were never stored, and are not read.
        """
        with self._lock:
            after = [self._stored[record] for record in records if record in self._stored]
            buffers, free_after = self._lend(records)
            pairs = list(zip(records, buffers, strict=True))

            def fill() -> None:
                for record, buffer in pairs:
                    if record in zeros:
                        buffer.zero_()
                stored = [pair for pair in pairs if pair[0] not in zeros]
                if stored:
                    self._file.read_all(stored, num_threads=1)

            lane = _lane_of(self.reads, records[0])
            fence = lane.submit(fill, after=[*free_after, *after])
            # Their next users wait for that.
            self._arrivals.update((buffer.data_ptr(), fence) for buffer in buffers)
            for record in records:
                self._note_fetch(record, fence)
        return buffers, fence

    def fetch_to_device(self, record: int, target: Tensor) -> tuple[Fence, list[Arrived]]:
        """Start to read ``record`` into device memory that nothing uses.

        Returns the fence behind which it has arrived, and a list that will then say how.
        """
        arrived: list[Arrived] = []
        with self._lock:
            after = [self._stored[record]] if record in self._stored else []
            fence = _lane_of(self.reads, record).submit(
                lambda: arrived.append(self._file.read_to_device(record, target)), after=after
            )
            self._note_fetch(record, fence)
        return fence, arrived

    def blank(self, record: int) -> tuple[Tensor, Fence]:
        """Return a buffer for a record's first value, and the fence behind which it may be filled.

        What the buffer holds is not defined.
        """
        with self._lock:
            (buffer,), free_after = self._lend([record])
            # Passed when the buffer is free, whatever became of the work of those who had it.
            return buffer, _lane_of(self.writes, record).submit(lambda: wait_over(free_after))

    def borrow(self, records: Sequence[int], guest: Guest) -> list[Tensor]:
        """Return a buffer for the next value of each in memory that is lent.

        It is free once all of them are given back, like others.
        """
        buffers, _ = self._lend(records, guest)
        return buffers

    def store(self, record: int, buffer: Tensor, after: Sequence[Fence]) -> Fence:
        """Write ``buffer`` to ``record`` behind ``after``, and then take the buffer back.

        If a fence of ``after`` failed, or the fetch that filled the buffer, nothing is written, and
        fetches of the record fail until it is stored again.
        """
        return self.store_all([(record, buffer)], after)

    def store_all(
        self,
        sources: Sequence[tuple[int, Tensor]],
        after: Sequence[Fence],
        fence: Fence | None = None,
    ) -> Fence:
        """``store`` for several records: all are written, or none counts as written.

        ``fence``: one that waits for it already.
        """
        for record, buffer in sources:
            if buffer.numel() != self._num_bytes(record):
                raise ValueError(
                    f"record {record} has {self._num_bytes(record)} bytes, not {buffer.numel()}"
                )
        with self._lock:
            users = self._users([buffer for _, buffer in sources], after)
            # Fetches that were asked for before must still see the older values, and an older store
            # must not come after this one.
            overtaken = []
            for record, _ in sources:
                overtaken += self._fetched.pop(record, [])
                if record in self._stored:
                    overtaken.append(self._stored[record])

            def write() -> None:
                wait_over(overtaken)
                self._file.write_all(sources, num_threads=1)

            lane = _lane_of(self.writes, sources[0][0])
            fence = lane.submit(write, after=users, fence=fence)
            self._stored.update(dict.fromkeys((record for record, _ in sources), fence))
            self._take_back([buffer for _, buffer in sources], users, lane)
        return fence

    def release(self, buffer: Tensor, after: Sequence[Fence]) -> None:
        """Take a buffer back behind ``after`` without writing it."""
        with self._lock:
            lane = _lane_of(self.writes, buffer.data_ptr() // self._staging.buffer_bytes)
            self._take_back([buffer], self._users([buffer], after), lane)

    def close(self) -> None:
        """Drop queued work, finish what is in hand and end the lanes; the file stays open."""
        lanes = (*self.writes, *self.reads)
        for lane in lanes:  # all of them, before the first is waited for
            lane.stop()
        for lane in lanes:
            lane.close()

    def _lend(
        self, records: Sequence[int], guest: Guest | None = None
    ) -> tuple[list[Tensor], list[Fence]]:
        return self._staging.lend([self._num_bytes(record) for record in records], guest)

    def _users(self, buffers: Sequence[Tensor], after: Sequence[Fence]) -> list[Fence]:
        """Return the fences of all who may touch the buffers: reads, and the caller's work."""
        for buffer in buffers:
            self._staging.check_lent(buffer)
        arrivals = [self._arrivals.pop(buffer.data_ptr(), None) for buffer in buffers]
        return [*after, *dict.fromkeys(fence for fence in arrivals if fence is not None)]

    def _note_fetch(self, record: int, fence: Fence) -> None:
        under_way = [earlier for earlier in self._fetched.get(record, []) if not earlier.is_issued]
        self._fetched[record] = [*under_way, fence]

    def _take_back(self, buffers: Sequence[Tensor], users: Sequence[Fence], lane: Lane) -> None:
        # Behind the write in its lane, and behind all users: the first that fails ends the wait of
        # the write, not the others' work. Failed or not the buffers are free then, so this fence
        # does not fail.
        free_after = lane.submit(lambda: wait_over(users))
        for buffer in buffers:
            returned = self._staging.take_back(buffer, free_after)
            if returned is not None:
                guest, fences = returned
                lane.submit(partial(wait_over, fences), fence=guest.free)

    def _num_bytes(self, record: int) -> int:
        return self._file.layout.records[record].num_bytes


def _lane_of(lanes: Sequence[Lane], number: int) -> Lane:
    """Return the lane of a record: the next one's is another."""
    return lanes[number % len(lanes)]


def wait_over(fences: Sequence[Fence]) -> None:
    """Wait until the work of each fence is over, whether it succeeded or not."""
    for fence in fences:
        with contextlib.suppress(LaneError):
            fence.block()
