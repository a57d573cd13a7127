"""A scratch file: records that are read back from disk as they were written, or not at all.

Allocated in full when it is made, so that a full disk is met before training starts. It lives only
as long as the process: its checksums are in memory and nothing is synced. What must survive
belongs in a checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES, Bytes, checksum_pages
from outcore.store import cufile_calls, disk_calls
from outcore.store.ledger import Ledger
from outcore.store.page_memory import page_bytes
from outcore.store.pieces import (
    DeviceBytes,
    Memory,
    OpenFile,
    failed,
    read_piece,
    read_piece_to_device,
    write_piece,
)
from outcore.store.record_access import RecordAccess
from outcore.store.record_layout import Record, RecordLayout, page_aligned_bytes
from outcore.store.scratch_creation import (
    SCRATCH_FILE_NAME,
    create_scratch,
    delete_scratch,
    inode_of,
    known_to_cufile,
)

MIN_PIECE_BYTES = 1 << 20
OUT_OF_DISK = "Raise the disk budget, or train fewer parameters."

# (file, memory, offset in the file, first page in the record, seed) → checksum
_Piece = Callable[[OpenFile, Memory, int, int, int], int]


@dataclass(frozen=True, kw_only=True)
class ScratchOptions:
    """How a scratch file is read and written."""

    direct: bool = True  # bypass the page cache where the file system can
    num_threads: int = 4  # for reads, and as many again for writes
    piece_bytes: int = 8 << 20  # of one request; a multiple of the page size
    to_device: bool = False  # read into device memory, where cuFile takes the file

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {self.num_threads}")
        if self.piece_bytes < PAGE_BYTES or self.piece_bytes % PAGE_BYTES:
            raise ValueError(
                f"piece_bytes must be a multiple of {PAGE_BYTES}, not {self.piece_bytes}"
            )


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What is known of a record's last write; no checksum while it is under way or if it failed."""

    num_writes: int
    checksum: int | None


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """A record that lies in device memory, unverified but for its last page if that is shared."""

    index: int
    num_bytes: int  # on the device: whole pages
    seed: int
    checksum: int  # that of these bytes, as they were written
    rest: Tensor | None  # what follows them, on the host


class ScratchFile:
    """Records of fixed size in one file, written and read as wholes from page-aligned memory.

    ``read`` and ``write`` block; any thread may call them, for different records at the same time.
    After a failed read the memory holds no particular bytes; after a failed write the record is
    lost until it is written again. Other records are not affected by either.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        sizes_bytes: Iterable[int],
        *,
        ledger: Ledger,
        options: ScratchOptions | None = None,
    ) -> None:
        """Create ``name``.scratch in ``directory`` with a record for each of ``sizes_bytes``."""
        self.options = options or ScratchOptions()
        self.layout = RecordLayout.of(sizes_bytes)
        self.path = directory / f"{name}.scratch"
        if not SCRATCH_FILE_NAME.fullmatch(f"{name}.scratch"):
            raise ValueError(f"{name!r} cannot name a scratch file: letters, digits, _ and - only")
        hold = ledger.hold(f"scratch {name}", self.layout.num_bytes, remedy=OUT_OF_DISK)
        try:
            self._file = create_scratch(
                self.path, self.layout.num_bytes, direct=self.options.direct
            )
        except BaseException:
            hold.give_back()
            raise
        if self.options.to_device:
            self._file = known_to_cufile(self._file)
        self._written = [_Written(num_writes=0, checksum=None)] * len(self.layout.records)
        self._access = RecordAccess()
        # Apart, or the pieces of a large write would stand before those of every read.
        self._readers = ThreadPoolExecutor(self.options.num_threads, "outcore-disk-read")
        self._writers = ThreadPoolExecutor(self.options.num_threads, "outcore-disk-write")
        # At exit, or when nobody refers to the file any more; then no piece is in flight.
        self._owner_pid = os.getpid()
        pools = (self._readers, self._writers)
        inode = inode_of(os.fstat(self._file.fd))
        self._release = weakref.finalize(
            self, _release, self._file, inode, hold.give_back, pools, self._owner_pid
        )

    @property
    def is_direct(self) -> bool:
        """Whether I/O bypasses the page cache."""
        return self._file.is_direct

    @property
    def reads_to_device(self) -> bool:
        """Whether ``read_to_device`` can be called."""
        return self._file.cufile_handle is not None

    def read(self, index: int, target: Tensor | memoryview) -> None:
        """Fill ``target`` with what was last written to the record."""
        record = self.layout.records[index]
        memory = page_bytes(target, record.num_bytes, writable=True)
        with self._access.reading(index):
            written, checksum = self._last_write(record)
            found = self._carry_out(self._readers, _read_and_sum, record, memory, written)
            self._compare(record, found, checksum)

    def read_to_device(self, index: int, target: Tensor) -> Arrived:
        """Fill flat ``target`` with what was last written, past the host; see ``verify``.

        Nothing else may be using the memory: cuFile knows of no streams. What lies on a page with
        the padding behind the record comes through the host, and is for the caller to copy.
        """
        record = self.layout.records[index]
        target_bytes = target.view(torch.uint8)
        rest_bytes = target_bytes.numel() % PAGE_BYTES
        whole = target_bytes.numel() - rest_bytes
        with self._access.reading(index):
            written, checksum = self._last_write(record)
            memory = DeviceBytes.of(target_bytes[:whole])
            self._carry_out(self._readers, _read_to_device, record, memory, written)
            rest, seed = None, _seed(record, written)
            if rest_bytes:
                page = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), dtype=np.uint8)
                checksum -= _read_and_sum(
                    self._file, page, record.offset + whole, whole // PAGE_BYTES, seed
                )
                rest = torch.from_numpy(page)[:rest_bytes]
        return Arrived(
            index=index, num_bytes=whole, seed=seed, checksum=checksum % 2**64, rest=rest
        )

    def verify(self, arrived: Arrived, found: int) -> None:
        """Raise if ``found``, the checksum of the bytes on the device, is not what was written."""
        self._compare(self.layout.records[arrived.index], found, arrived.checksum)

    def write(self, index: int, source: Tensor | memoryview) -> None:
        """Make ``source`` the record's value; it must not change before this returns."""
        record = self.layout.records[index]
        memory = page_bytes(source, record.num_bytes)
        with self._access.writing(index):
            # Lost until it has succeeded: a failure must not leave the older value to be read.
            written = _Written(num_writes=self._written[index].num_writes + 1, checksum=None)
            self._written[index] = written
            self._check_file(record)
            checksum = self._carry_out(self._writers, _sum_and_write, record, memory, written)
            self._written[index] = _Written(num_writes=written.num_writes, checksum=checksum)

    def map(self) -> mmap.mmap:
        """Return the whole file as shared memory, through the page cache and unverified."""
        try:
            return mmap.mmap(self._file.fd, self.layout.num_bytes)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self.path} cannot be mapped ({error}): name a disk with an ordinary file system",
                path=self.path,
            ) from error

    def close(self) -> None:
        """Wait for I/O in flight, delete the file and give its bytes back."""
        # The descriptor's number may belong to another file as soon as it is closed, so the last
        # piece must be over by then.
        self._readers.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        self._release()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _last_write(self, record: Record) -> tuple[_Written, int]:
        """Return what the record was last given, with its checksum; raises if it has no value."""
        written = self._written[record.index]
        if written.num_writes == 0:
            raise ValueError(f"{self.path}: record {record.index} was never written")
        if written.checksum is None:
            raise self._error(record, "its last write failed. Write it again before reading")
        self._check_file(record)
        return written, written.checksum

    def _compare(self, record: Record, found: int, checksum: int) -> None:
        if found != checksum:
            raise self._error(
                record,
                f"the bytes read are not those written (checksum {found:016x}, not "
                f"{checksum:016x}). The drive, its cable or the memory damages data, or another "
                "program wrote here: name another disk, and continue from the last checkpoint",
            )

    def _carry_out(
        self,
        pool: ThreadPoolExecutor,
        work: _Piece[Memory],
        record: Record,
        memory: Memory,
        written: _Written,
    ) -> int:
        """Do ``work`` on each piece of a record and return the sum of the checksums."""
        seed = _seed(record, written)
        futures: list[Future[int]] = []
        try:
            piece_bytes = self._piece_bytes(record)
            for start in range(0, memory.size, piece_bytes):
                piece = memory[start : start + piece_bytes]
                futures.append(
                    pool.submit(
                        work, self._file, piece, record.offset + start, start // PAGE_BYTES, seed
                    )
                )
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        except RuntimeError as error:  # closed meanwhile, or no thread can be started
            raise self._error(record, f"no thread takes the work ({error})") from error
        finally:
            # Nobody gets the memory or the record back while a thread still works on it.
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
        for future in futures:
            if not future.cancelled() and (failure := future.exception()) is not None:
                raise failure
        return sum(future.result() for future in futures) % 2**64

    def _piece_bytes(self, record: Record) -> int:
        """Return the bytes of one request: small enough for every thread to have one."""
        share = page_aligned_bytes(-(-record.num_bytes // self.options.num_threads))
        return min(self.options.piece_bytes, max(MIN_PIECE_BYTES, share))

    def _check_file(self, record: Record) -> None:
        """Raise if the file was deleted or cut: the descriptor alone would not tell."""
        if not self._release.alive:
            raise self._error(record, "the file is closed")
        if os.getpid() != self._owner_pid:  # the threads did not come along
            raise self._error(record, "the file belongs to the process that this one forked from")
        try:
            status = disk_calls.status(self._file.fd)
        except OSError as error:
            raise failed(
                error,
                path=self.path,
                verb="examine",
                offset=record.offset,
                num_bytes=record.num_bytes,
            ) from error
        if status.st_nlink == 0:
            what = "the file was deleted"
        elif status.st_size < record.end:
            what = f"the file was cut to {status.st_size} bytes"
        else:
            return
        raise self._error(
            record, f"{what}. Keep other programs away from the scratch directory, and start again"
        )

    def _error(self, record: Record, what: str) -> StoreError:
        return StoreError(
            f"{self.path}: record {record.index} at offset {record.offset} "
            f"({record.num_bytes} bytes): {what}.",
            path=self.path,
            offset=record.offset,
        )


def _seed(record: Record, written: _Written) -> int:
    """A record's place and its number of writes: no two writes of a file share a seed."""
    return (record.index << 40) + written.num_writes


# Functions and not methods: a thread that is done with a piece must not hold the last reference to
# the file, whose release would then run on it.


def _read_and_sum(file: OpenFile, target: Bytes, offset: int, first_page: int, seed: int) -> int:
    read_piece(file, target, offset)
    return checksum_pages(target, first_page=first_page, seed=seed)


def _read_to_device(
    file: OpenFile, target: DeviceBytes, offset: int, first_page: int, seed: int
) -> int:
    read_piece_to_device(file, target, offset)
    return 0  # summed by whoever can look at it


def _sum_and_write(file: OpenFile, source: Bytes, offset: int, first_page: int, seed: int) -> int:
    checksum = checksum_pages(source, first_page=first_page, seed=seed)
    write_piece(file, source, offset)
    return checksum


def _release(
    file: OpenFile,
    inode: tuple[int, int],
    give_back: Callable[[], None],
    pools: tuple[ThreadPoolExecutor, ...],
    owner_pid: int,
) -> None:
    if os.getpid() != owner_pid:  # a forked child that exits must not delete its parent's file
        return
    for pool in pools:
        pool.shutdown(wait=False)
    delete_scratch(file.path, inode)
    if file.cufile_handle is not None:
        with contextlib.suppress(RuntimeError):
            cufile_calls.deregister(file.cufile_handle)
    with contextlib.suppress(OSError):
        disk_calls.close(file.fd)
    give_back()
