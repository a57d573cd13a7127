"""Ranges of files, read by a few threads in the order in which they lie on disk.

Each thread reads a window of a file into a buffer of its own, past the page cache where the file
system can, and hands the bytes on from there. What goes to memory as it is, the library reads and
copies in pieces that stay in a core's cache; it comes before the rest. What is read in another
order than the files' is read again and again; memory that is new for each range costs as much time
as the reading.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from outcore.errors import StoreError
from outcore.kernels.file_copy import CopyRun, read_and_copy
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger
from outcore.stream.recording import recorded

WINDOW_BYTES = 8 << 20
LEAST_WINDOW_BYTES = 1 << 20
NUM_THREADS = 6  # some read while the others hand on
_COPIED_AT_ONCE_BYTES = 1 << 20  # what a core's own cache holds
_PAGE_BYTES = mmap.PAGESIZE  # direct reads begin and end at multiples of it


@dataclass(frozen=True, kw_only=True, eq=False)
class FileRange:
    """Bytes [start, end) of a file, and who takes them.

    ``put`` gets runs of them with the place of each in the range, in no order, from several threads
    at once. A run begins at a multiple of ``granule_bytes``, and ends at one or with the range.
    It lasts until ``put`` returns. Where ``memory`` is given, as many bytes of the host's, they may
    be copied there instead.
    """

    path: Path
    start: int
    end: int
    put: Callable[[Tensor, int], None]
    memory: Tensor | None = None
    granule_bytes: int = 1
    owner: Hashable = None


def read_ranges(ranges: Sequence[FileRange], *, pin: bool = False) -> Iterator[Hashable]:
    """Read the ranges; yield each owner when all that it has among them is put.

    pin: whether buffers are pinned, for runs that are copied to a GPU.
    Raises StoreError for what cannot be read, and whatever ``put`` raises. No thread is left then.
    """
    windows = sorted(_windows(ranges), key=_needs_put)
    if not windows:
        return
    left = Counter(run.range.owner for window in windows for run in window.runs)
    reading = _Reading(windows, pin)
    try:
        reading.start()
        while left:
            done = reading.done.get()
            if isinstance(done, BaseException):
                raise done
            for run in done.runs:
                left[run.range.owner] -= 1
                if left[run.range.owner] == 0:
                    del left[run.range.owner]
                    yield run.range.owner
    finally:
        reading.stop()


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Bytes of a range that lie in one window; ``start`` and ``end`` as in the file."""

    range: FileRange
    start: int
    end: int


@dataclass(kw_only=True)
class _Window:
    """A part of a file that is read at once; it begins at a page."""

    path: Path
    start: int
    most_bytes: int
    runs: list[_Run] = field(default_factory=list)

    @property
    def end(self) -> int:
        return max(run.end for run in self.runs)

    def takes_up_to(self, range_: FileRange, start: int) -> int | None:
        """Return where what the window can take of the range from ``start`` on ends, if any."""
        limit = self.start + self.most_bytes
        if self.path != range_.path or not self.start <= start <= limit:
            return None
        if range_.end <= limit:
            return range_.end
        granules = (limit - range_.start) // range_.granule_bytes
        end = range_.start + granules * range_.granule_bytes
        return end if end > start else None


def _needs_put(window: _Window) -> bool:
    """Whether not all of it goes to the host's memory as it is.

    Such windows come last: what they copy to a GPU would wait while that memory is pinned, which
    begins when its pages are made.
    """
    return any(run.range.memory is None for run in window.runs)


def window_bytes(ranges: Sequence[FileRange]) -> int:
    """Return how much is read at once: all buffers are to take no more than two usual owners."""
    sizes: Counter[Hashable] = Counter()
    for range_ in ranges:
        sizes[range_.owner] += range_.end - range_.start
    usual = statistics.median_low(sizes.values()) if sizes else 0
    share = 2 * usual // NUM_THREADS // _PAGE_BYTES * _PAGE_BYTES
    return min(WINDOW_BYTES, max(LEAST_WINDOW_BYTES, share))


def _windows(ranges: Sequence[FileRange]) -> list[_Window]:
    """Cut what the ranges need into windows, in the order of the files; neighbours share one."""
    windows: list[_Window] = []
    most_bytes = window_bytes(ranges)
    for range_ in sorted(ranges, key=lambda r: (r.path, r.start)):
        start = range_.start
        while True:
            end = windows[-1].takes_up_to(range_, start) if windows else None
            if end is None:
                windows.append(_window_at(start, range_, most_bytes))
                end = windows[-1].takes_up_to(range_, start)
                assert end is not None
            windows[-1].runs.append(_Run(range=range_, start=start, end=end))
            start = end
            if start == range_.end:
                break
    return windows


def _window_at(start: int, range_: FileRange, most_bytes: int) -> _Window:
    return _Window(
        path=range_.path,
        start=start // _PAGE_BYTES * _PAGE_BYTES,
        most_bytes=max(most_bytes, _whole_pages(range_.granule_bytes) + _PAGE_BYTES),
    )


class _Reading:
    """The threads that read windows, their buffers, and the files that they have open."""

    def __init__(self, windows: list[_Window], pin: bool) -> None:
        self.done: SimpleQueue[_Window | BaseException] = SimpleQueue()
        self._windows = iter(windows)
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[int, bool]] = {}
        num_threads = min(NUM_THREADS, len(windows))
        size = _whole_pages(max(window.most_bytes for window in windows))
        buffers = HostArena(
            num_threads * size, purpose="reading", ledger=Ledger("host", None), pin=pin
        )
        self._threads = [
            threading.Thread(
                target=self._work, args=[buffers.span(size, torch.uint8)], name=f"outcore-load-{i}"
            )
            for i in range(num_threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait until every thread has ended, each after the window that it is at."""
        with self._lock:
            self._windows = iter(())
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()

    def _work(self, buffer: Tensor) -> None:
        try:
            while (taken := self._take()) is not None:
                window, file, is_direct = taken
                with recorded("disk read", window.path.name):
                    is_copied = _copy(window, file, buffer)
                    num_bytes = 0 if is_copied else _read(window, file, is_direct, buffer)
                for run in () if is_copied else window.runs:
                    self._hand_on(window, run, buffer[:num_bytes])
                self.done.put(window)
        except BaseException as error:  # told by the thread that waits
            self.done.put(error)

    def _take(self) -> tuple[_Window, int, bool] | None:
        with self._lock:
            window = next(self._windows, None)
            if window is None:
                return None
            if window.path not in self._files:
                self._files[window.path] = _open(window.path)
            return window, *self._files[window.path]

    def _hand_on(self, window: _Window, run: _Run, read: Tensor) -> None:
        if run.end - window.start > read.numel():
            at = window.start + read.numel()
            raise StoreError(
                f"{window.path} ends at byte {at}: it was cut short", path=window.path, offset=at
            )
        within = read[run.start - window.start : run.end - window.start]
        run.range.put(within, run.start - run.range.start)


def _copy(window: _Window, file: int, buffer: Tensor) -> bool:
    """Read a window all of which goes to memory, and copy it there; whether that is done."""
    runs = []
    for run in window.runs:
        if run.range.memory is None:
            return False
        memory = run.range.memory[run.start - run.range.start : run.end - run.range.start]
        if memory.numel():
            runs.append(CopyRun(start=run.start - window.start, memory=memory))
    size = window.end - window.start
    buffer = buffer[:_COPIED_AT_ONCE_BYTES]
    return read_and_copy(file, window.start, size, buffer=buffer, runs=runs) == size


def _read(window: _Window, file: int, is_direct: bool, buffer: Tensor) -> int:
    """Read until the window is full or the file ends; return how much that was."""
    size = _whole_pages(window.end - window.start)
    memory, done = buffer.numpy().data, 0
    try:
        while done < size:
            count = os.preadv(file, [memory[done:size]], window.start + done)
            done += count
            # A short read ends off a page only where the file does.
            if count == 0 or (is_direct and done % _PAGE_BYTES):
                break
    except OSError as error:
        raise StoreError(
            f"{window.path}: cannot be read at byte {window.start + done}: {error.strerror}",
            path=window.path,
            offset=window.start + done,
        ) from error
    return done


def _open(path: Path) -> tuple[int, bool]:
    """Return a file, and whether it is read past the page cache."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    try:
        if direct:
            with contextlib.suppress(OSError):  # EINVAL: this file system has none
                file = os.open(path, flags | direct)
                try:
                    os.preadv(file, [mmap.mmap(-1, _PAGE_BYTES)], 0)
                except OSError:
                    os.close(file)
                    raise
                return file, True
        return os.open(path, flags), False
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}", path=path) from error


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
