"""The disk under a path: large aligned reads and writes past the page cache, where it allows that.

State that lives on a disk is read and written in one step, so both at once is measured too: most
disks share one bandwidth between the two. That is looked at several times, over as long as a probe
takes, and the median counts.

What counts is what lasts, and arrives where it is used. Disks are faster for the first seconds, so
only the second half of each measurement counts. A buffer that is read into again and again stays in
a cache, which can show a third more than memory gets; scattered pages can show a third of it. So
blocks go through as much memory as training stages them in, and of the same kind.

The file has no name from the moment it is open, so nothing is left behind however the probe ends.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from outcore.errors import StoreError
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger
from outcore.store.memory_limits import available_host_bytes
from outcore.units import format_bytes

from .report import DiskFigures
from .sizes import ProbeSizes

_NUM_THREADS = 8  # requests in flight: enough for what the twelve lanes of state get
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_MOST_OF_FREE = 4  # the file takes at most a fourth of what is free
_FEWEST_BLOCKS = 2 * _NUM_THREADS  # that tell a rate
_LOOK = 0.75  # at both ways at once, in units of the time for writing
NUM_LOOKS = 4


def default_scratch() -> Path:
    """Return a folder on a real disk if there is one: the temporary one, the home, this one."""
    candidates = [Path(tempfile.gettempdir()), Path.home(), Path.cwd()]
    usable = [path for path in candidates if path.is_dir() and os.access(path, os.W_OK)]
    on_disk = [path for path in usable if not lies_in_memory(path)]
    return (on_disk or usable or candidates)[0]


def measure_disk(folder: Path, sizes: ProbeSizes, *, pin: bool = False) -> DiskFigures:
    """Write and read one nameless file; StoreError if it cannot be written.

    pin: whether memory is pinned, as it is where a GPU copies from it.
    """
    with measuring_disk(folder, sizes, pin=pin) as disk:
        while disk.num_looks < NUM_LOOKS:
            disk.look()
        return disk.figures()


@contextlib.contextmanager
def measuring_disk(
    folder: Path, sizes: ProbeSizes, *, pin: bool = False
) -> Iterator[DiskMeasurement]:
    """Yield a disk that was written to and read, to be looked at again between other things."""
    free_bytes = free_disk_bytes(folder)
    room_bytes = free_bytes
    memory_bytes = available_host_bytes()
    if memory_bytes is not None and file_system_of(folder) in _IN_MEMORY:
        room_bytes = min(room_bytes, memory_bytes)  # it may promise more than there is
    num_blocks = min(sizes.disk_bytes, room_bytes // _MOST_OF_FREE) // sizes.disk_block_bytes
    if num_blocks == 0:
        raise StoreError(
            f"{folder}: {format_bytes(room_bytes)} are free, and measuring the disk takes "
            f"{format_bytes(_MOST_OF_FREE * sizes.disk_block_bytes)}; --disk names another folder"
        )
    with contextlib.ExitStack() as stack:
        with _named_errors(folder):
            file, is_direct = stack.enter_context(_nameless_file(folder))
        blocks = _FileBlocks(file, is_direct, num_blocks, sizes, pin)
        yield DiskMeasurement(folder, blocks, is_direct=is_direct, free_bytes=free_bytes)


class DiskMeasurement:
    """What a disk gives, over as many looks as it gets.

    One that is shared goes up and down by the second, so several short looks tell more than a long
    one. State on disk rests on both ways at once: only that is looked at again.
    """

    def __init__(
        self, folder: Path, blocks: _FileBlocks, *, is_direct: bool, free_bytes: int
    ) -> None:
        self._folder = folder
        self._blocks = blocks
        self._is_direct = is_direct
        self._free_bytes = free_bytes
        self._both_ways: list[float] = []
        with _named_errors(folder):
            self._write_bytes_s = blocks.run(_write)
            self._read_bytes_s = blocks.run(_read)
        self.look()

    @property
    def num_looks(self) -> int:
        return len(self._both_ways)

    def look(self) -> None:
        """Measure both ways at once, as it is now."""
        with _named_errors(self._folder):
            self._both_ways.append(self._blocks.run(_read_and_write, times_as_long=_LOOK))

    def figures(self) -> DiskFigures:
        file_system = file_system_of(self._folder)
        return DiskFigures(
            path=str(self._folder.resolve()),
            file_system=file_system,
            free_bytes=self._free_bytes,
            read_bytes_s=self._read_bytes_s,
            write_bytes_s=self._write_bytes_s,
            both_ways_bytes_s=statistics.median(self._both_ways),
            both_ways_seen_bytes_s=tuple(self._both_ways),
            is_direct=self._is_direct,
            is_memory=file_system in _IN_MEMORY,
        )


@contextlib.contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder}: {error.strerror or error}; --disk names another folder"
        ) from error


def free_disk_bytes(folder: Path) -> int:
    """Return what an ordinary user may still write there."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize


def lies_in_memory(path: Path) -> bool:
    return file_system_of(path) in _IN_MEMORY


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds ``path``, such as "ext4"."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    real, best, found = path.resolve(), "", "unknown"
    for line in lines:
        # id parent major:minor root mount-point options... - type source options
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        # The last of several mounts on one point is the one that is seen.
        if len(mount) >= len(best) and (real == Path(mount) or Path(mount) in real.parents):
            best, found = mount, right.split()[0]
    return found


@contextlib.contextmanager
def _nameless_file(folder: Path) -> Iterator[tuple[int, bool]]:
    """Yield a file that only this process sees, and whether it bypasses the page cache."""
    descriptor, name = tempfile.mkstemp(prefix=".outcore-probe-", dir=folder)
    direct: int | None = None
    try:
        try:
            with contextlib.suppress(OSError):  # EINVAL: this file system has no O_DIRECT
                direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        finally:
            os.unlink(name)
        in_memory = file_system_of(folder) in _IN_MEMORY
        is_direct = direct is not None and hasattr(os, "O_DIRECT") and not in_memory
        yield (descriptor if direct is None else direct), is_direct
    finally:
        os.close(descriptor)
        if direct is not None:
            os.close(direct)


class _FileBlocks:
    """The blocks of one file, which a few threads read or write in turn until time is up."""

    def __init__(
        self, file: int, is_direct: bool, num_blocks: int, sizes: ProbeSizes, pin: bool
    ) -> None:
        self._file = file
        self._is_direct = is_direct
        self._num_blocks = num_blocks
        self._num_written = 0  # all blocks before are in the file
        self._block_bytes = sizes.disk_block_bytes
        self._limit_s = sizes.disk_s
        num_buffers = max(_NUM_THREADS, sizes.disk_memory_bytes // self._block_bytes)
        arena = HostArena(
            num_buffers * self._block_bytes, purpose="probe", ledger=Ledger("host", None), pin=pin
        )
        # What cannot be compressed is written.
        noise = torch.frombuffer(bytearray(os.urandom(self._block_bytes)), dtype=torch.uint8)
        self._buffers: list[memoryview] = []
        for _ in range(num_buffers):
            buffer = arena.span(self._block_bytes, torch.uint8)
            self._buffers.append(buffer.copy_(noise).numpy().data)

    def run(
        self, operation: Callable[[int, memoryview, int], int], *, times_as_long: float = 1.0
    ) -> float:
        """Return bytes a second, while they last; goes through the file again if there is time."""
        limit_s = times_as_long * self._limit_s
        lock, stop, order = threading.Lock(), threading.Event(), itertools.count()
        num_blocks = self._num_written or self._num_blocks
        done_s: list[float] = []  # when each block was, in no order
        start_s = time.perf_counter()

        def work(_: int) -> None:
            while not stop.is_set() and time.perf_counter() - start_s < limit_s:
                with lock:
                    index = next(order)
                offset = index % num_blocks * self._block_bytes
                buffer = self._buffers[index % len(self._buffers)]
                if operation(self._file, buffer, offset) != self._block_bytes:
                    raise OSError(errno.EIO, f"a block at {offset} moved in part")
                if not self._is_direct:
                    self._forget_pages(offset)
                done_s.append(time.perf_counter() - start_s)

        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="outcore-probe") as pool:
            try:
                list(pool.map(work, range(_NUM_THREADS)))
            finally:
                stop.set()  # Ctrl-C: the threads end after the block that they are at
        os.fsync(self._file)
        self._num_written = self._num_written or min(len(done_s), num_blocks)
        return self._block_bytes * lasting_rate(done_s, time.perf_counter() - start_s)

    def _forget_pages(self, offset: int) -> None:
        """Without O_DIRECT a block is in the page cache, and reading it would measure that."""
        os.fdatasync(self._file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, self._block_bytes, os.POSIX_FADV_DONTNEED)


def lasting_rate(done_s: Sequence[float], end_s: float) -> float:
    """Return how many were done a second in the second half of the time.

    ``done_s``: when each was, in no order; ``end_s``: when all of it was over. Where the second
    half has only a few, those of the whole time count.
    """
    later = sorted(second for second in done_s if second >= end_s / 2)
    if len(later) < _FEWEST_BLOCKS:
        return len(done_s) / end_s
    # A disk that shares itself out ends as many as there are threads at once, and the first of them
    # would count as done in no time: not so by the slope. The end counts what was only synced then.
    slope = statistics.linear_regression(later, range(len(later))).slope
    return min(slope, (len(later) - 1) / (end_s - later[0]))


def _write(file: int, buffer: memoryview, offset: int) -> int:
    return os.pwritev(file, [buffer], offset)


def _read(file: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(file, [buffer], offset)


def _read_and_write(file: int, buffer: memoryview, offset: int) -> int:
    """Read a block and write it back, as an update does; threads are at different halves."""
    if os.preadv(file, [buffer], offset) < len(buffer):
        return 0
    return os.pwritev(file, [buffer], offset)
