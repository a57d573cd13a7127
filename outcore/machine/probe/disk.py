"""The disk under a path: large aligned reads and writes past the page cache, where it allows that.

State that lives on a disk is read and written in one step, so both at once is measured too: most
disks share one bandwidth between the two.

The file has no name from the moment it is open, so nothing is left behind however the probe ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outcore.errors import StoreError
from outcore.units import format_bytes

from .report import DiskFigures
from .sizes import ProbeSizes

_NUM_THREADS = 4  # requests in flight: one is enough for a slow disk, a fast one wants some
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_MOST_OF_FREE = 4  # the file takes at most a fourth of what is free


def default_scratch() -> Path:
    """Return a folder on a real disk if there is one: the temporary one, the home, this one."""
    candidates = [Path(tempfile.gettempdir()), Path.home(), Path.cwd()]
    usable = [path for path in candidates if path.is_dir() and os.access(path, os.W_OK)]
    on_disk = [path for path in usable if file_system_of(path) not in _IN_MEMORY]
    return (on_disk or usable or candidates)[0]


def measure_disk(folder: Path, sizes: ProbeSizes) -> DiskFigures:
    """Write, sync and read one nameless file; StoreError if it cannot be written."""
    free_bytes = free_disk_bytes(folder)
    num_blocks = min(sizes.disk_bytes, free_bytes // _MOST_OF_FREE) // sizes.disk_block_bytes
    if num_blocks == 0:
        raise StoreError(
            f"{folder}: {format_bytes(free_bytes)} are free, and measuring the disk takes "
            f"{format_bytes(_MOST_OF_FREE * sizes.disk_block_bytes)}; --disk names another folder"
        )
    try:
        with _nameless_file(folder) as (file, is_direct):
            file_blocks = _FileBlocks(file, num_blocks, sizes.disk_block_bytes)
            write_bytes_s = file_blocks.run(_write, sizes.disk_s, sync=True)
            if not is_direct:
                _forget_pages(file)
            read_bytes_s = file_blocks.run(_read, sizes.disk_s, sync=False)
            if not is_direct:
                _forget_pages(file)
            both_ways_bytes_s = file_blocks.run(_read_and_write, sizes.disk_s, sync=True)
    except OSError as error:
        raise StoreError(
            f"{folder}: {error.strerror or error}; --disk names another folder"
        ) from error
    file_system = file_system_of(folder)
    return DiskFigures(
        path=str(folder.resolve()),
        file_system=file_system,
        free_bytes=free_bytes,
        read_bytes_s=read_bytes_s,
        write_bytes_s=write_bytes_s,
        both_ways_bytes_s=both_ways_bytes_s,
        is_direct=is_direct,
        is_memory=file_system in _IN_MEMORY,
    )


def free_disk_bytes(folder: Path) -> int:
    """Return what an ordinary user may still write there."""
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize


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

    def __init__(self, file: int, num_blocks: int, block_bytes: int) -> None:
        self._file = file
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        # Anonymous maps begin on a page, as O_DIRECT wants. What cannot be compressed is written.
        self._buffers = [mmap.mmap(-1, block_bytes) for _ in range(_NUM_THREADS)]
        noise = os.urandom(block_bytes)
        for buffer in self._buffers:
            buffer.write(noise)

    def run(
        self, operation: Callable[[int, mmap.mmap, int], int], limit_s: float, sync: bool
    ) -> float:
        """Return bytes a second. Goes once through the file, or stops when time is up."""
        lock, stop = threading.Lock(), threading.Event()
        order = iter(range(self._num_blocks))
        start = time.perf_counter()

        def work(buffer: mmap.mmap) -> int:
            done = 0
            while not stop.is_set() and time.perf_counter() - start < limit_s:
                with lock:
                    index = next(order, None)
                if index is None:
                    break
                if operation(self._file, buffer, index * self._block_bytes) != self._block_bytes:
                    break  # the end of what was written within its time
                done += self._block_bytes
            return done

        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="outcore-probe") as pool:
            try:
                num_bytes = sum(pool.map(work, self._buffers))
            finally:
                stop.set()  # Ctrl-C: the threads end after the block that they are at
        if sync:
            os.fsync(self._file)
        if num_bytes == 0:
            raise OSError(errno.EIO, "not one block could be written and read in time")
        return num_bytes / (time.perf_counter() - start)


def _write(file: int, buffer: mmap.mmap, offset: int) -> int:
    return os.pwritev(file, [buffer], offset)


def _read(file: int, buffer: mmap.mmap, offset: int) -> int:
    return os.preadv(file, [buffer], offset)


def _read_and_write(file: int, buffer: mmap.mmap, offset: int) -> int:
    """Read a block and write it back, as an update does; threads are at different halves."""
    if os.preadv(file, [buffer], offset) < len(buffer):
        return 0
    return os.pwritev(file, [buffer], offset)


def _forget_pages(file: int) -> None:
    """Without O_DIRECT the file is in the page cache, and reading it would measure that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
