"""A scratch file: records that are read back from disk as they were written, or not at all.

Allocated in full when it is made, so that a full disk is met before training starts. It lives only
as long as the process: its checksums are in memory and nothing is synced. What must survive
belongs in a checkpoint.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES
from outcore.store import cufile_calls, disk_calls
from outcore.store.cached_records import cached_checksums
from outcore.store.ledger import Ledger
from outcore.store.page_memory import page_bytes
from outcore.store.pieces import DeviceBytes, OpenFile, failed
from outcore.store.record_access import RecordAccess
from outcore.store.record_layout import Record, RecordLayout
from outcore.store.record_transfer import Order, RecordTransfer, read_and_sum, record_error
from outcore.store.scratch_creation import (
    SCRATCH_FILE_NAME,
    create_scratch,
    delete_scratch,
    inode_of,
    known_to_cufile,
)

OUT_OF_DISK = "Raise the disk budget, or train fewer parameters."

HostMemory = Tensor | memoryview


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
    ``read_all`` and ``write_all`` move several at once, which keeps the disk busier than one after
    the other. After a failed read the memory holds no particular bytes; after a failed write the
    records are lost until they are written again. Other records are not affected by either.
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
        self._transfer = RecordTransfer(
            self._file, num_threads=self.options.num_threads, piece_bytes=self.options.piece_bytes
        )
        # At exit, or when nobody refers to the file any more.
        self._owner_pid = os.getpid()
        self._release = weakref.finalize(
            self,
            _release,
            self._file,
            inode_of(os.fstat(self._file.fd)),
            hold.give_back,
            self._transfer,
            self._access,
            self._owner_pid,
        )

    @property
    def is_direct(self) -> bool:
        """Whether I/O bypasses the page cache."""
        return self._file.is_direct

    @property
    def reads_to_device(self) -> bool:
        """Whether ``read_to_device`` can be called."""
        return self._file.cufile_handle is not None

    def read(self, index: int, target: HostMemory) -> None:
        """Fill ``target`` with what was last written to the record."""
        self.read_all([(index, target)])

    def read_all(
        self, targets: Sequence[tuple[int, HostMemory]], *, num_threads: int | None = None
    ) -> None:
        """Fill each target with what was last written to its record.

        ``num_threads``: by default as many as the options say.
        """
        found = [self.layout.records[index] for index, _ in targets]
        memory = [
            page_bytes(target, record.num_bytes, writable=True)
            for record, (_, target) in zip(found, targets, strict=True)
        ]
        with self._access.reading(record.index for record in found):
            expected, orders = [], []
            for record, bytes_ in zip(found, memory, strict=True):
                written, checksum = self._last_write(record)
                expected.append(checksum)
                orders.append(Order(record=record, memory=bytes_, seed=_seed(record, written)))
            sums = self._transfer.read(orders, num_threads or self.options.num_threads)
            for record, checksum, arrived in zip(found, expected, sums, strict=True):
                self._compare(record, arrived, checksum)

    def read_to_device(self, index: int, target: Tensor) -> Arrived:
        """Fill flat ``target`` with what was last written, past the host; see ``verify``.

        Nothing else may be using the memory: cuFile knows of no streams. What lies on a page with
        the padding behind the record comes through the host, and is for the caller to copy.
        """
        record = self.layout.records[index]
        target_bytes = target.view(torch.uint8)
        rest_bytes = target_bytes.numel() % PAGE_BYTES
        whole = target_bytes.numel() - rest_bytes
        with self._access.reading([index]):
            written, checksum = self._last_write(record)
            self._transfer.read_to_device(record, DeviceBytes.of(target_bytes[:whole]))
            rest, seed = None, _seed(record, written)
            if rest_bytes:
                page = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), dtype=np.uint8)
                checksum -= read_and_sum(
                    self._file, page, record.offset + whole, whole // PAGE_BYTES, seed
                )
                rest = torch.from_numpy(page)[:rest_bytes]
        return Arrived(
            index=index, num_bytes=whole, seed=seed, checksum=checksum % 2**64, rest=rest
        )

    def verify(self, arrived: Arrived, found: int) -> None:
        """Raise if ``found``, the checksum of the bytes on the device, is not what was written."""
        self._compare(self.layout.records[arrived.index], found, arrived.checksum)

    def write(self, index: int, source: HostMemory) -> None:
        """Make ``source`` the record's value; it must not change before this returns."""
        self.write_all([(index, source)])

    def write_all(
        self, sources: Sequence[tuple[int, HostMemory]], *, num_threads: int | None = None
    ) -> None:
        """Make each source its record's value; none may change before this returns."""
        found = [self.layout.records[index] for index, _ in sources]
        assert len({record.index for record in found}) == len(found), "a record with two values"
        memory = [
            page_bytes(source, record.num_bytes)
            for record, (_, source) in zip(found, sources, strict=True)
        ]
        with self._access.writing(record.index for record in found):
            orders = []
            for record, bytes_ in zip(found, memory, strict=True):
                # Lost until all have succeeded: a failure must not leave an older value to be read.
                num_writes = self._written[record.index].num_writes + 1
                written = _Written(num_writes=num_writes, checksum=None)
                self._written[record.index] = written
                orders.append(Order(record=record, memory=bytes_, seed=_seed(record, written)))
            for record in found:
                self._check_file(record)
            sums = self._transfer.write(orders, num_threads or self.options.num_threads)
            for record, checksum in zip(found, sums, strict=True):
                num_writes = self._written[record.index].num_writes
                self._written[record.index] = _Written(num_writes=num_writes, checksum=checksum)

    def map(self) -> mmap.mmap:
        """Return the whole file as shared memory, through the page cache; see ``check``."""
        try:
            return mmap.mmap(self._file.fd, self.layout.num_bytes)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self.path} cannot be mapped ({error}): name a disk with an ordinary file system",
                path=self.path,
            ) from error

    def check(self, indices: Sequence[int]) -> None:
        """Raise unless ``map`` shows what was last written to each of the records."""
        found = [self.layout.records[index] for index in indices]
        with self._access.reading(indices):
            last = [self._last_write(record) for record in found]
            seeds = [_seed(record, write) for record, (write, _) in zip(found, last, strict=True)]
            sums = cached_checksums(self._file, found, seeds, num_threads=self.options.num_threads)
            for record, arrived, (_, checksum) in zip(found, sums, last, strict=True):
                self._compare(record, arrived, checksum)

    def check_uncut(self) -> None:
        """Raise if the file was cut: who looks at a map behind its end ends the process."""
        last = self.layout.records[-1]
        status = self._status(last)
        if status.st_size < last.end:
            raise self._harmed(last, f"the file was cut to {status.st_size} bytes")

    def close(self) -> None:
        """Wait for I/O in flight, delete the file and give its bytes back."""
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

    def _check_file(self, record: Record) -> None:
        """Raise if the file was deleted or cut: the descriptor alone would not tell."""
        if self._access.is_closed:
            raise self._error(record, "the file is closed")
        if os.getpid() != self._owner_pid:  # the threads did not come along
            raise self._error(record, "the file belongs to the process that this one forked from")
        status = self._status(record)
        if status.st_nlink == 0:
            raise self._harmed(record, "the file was deleted")
        if status.st_size < record.end:
            raise self._harmed(record, f"the file was cut to {status.st_size} bytes")

    def _status(self, record: Record) -> os.stat_result:
        try:
            return disk_calls.status(self._file.fd)
        except OSError as error:
            raise failed(
                error,
                path=self.path,
                verb="examine",
                offset=record.offset,
                num_bytes=record.num_bytes,
            ) from error

    def _harmed(self, record: Record, what: str) -> StoreError:
        return self._error(
            record, f"{what}. Keep other programs away from the scratch directory, and start again"
        )

    def _error(self, record: Record, what: str) -> StoreError:
        return record_error(self.path, record, what)


def _seed(record: Record, written: _Written) -> int:
    """A record's place and its number of writes: no two writes of a file share a seed."""
    return (record.index << 40) + written.num_writes


def _release(
    file: OpenFile,
    inode: tuple[int, int],
    give_back: Callable[[], None],
    transfer: RecordTransfer,
    access: RecordAccess,
    owner_pid: int,
) -> None:
    if os.getpid() != owner_pid:  # a forked child that exits must not delete its parent's file
        return
    # The descriptor's number may belong to another file as soon as it is closed, so the last piece
    # must be over by then.
    access.close()
    transfer.shutdown()
    delete_scratch(file.path, inode)
    if file.cufile_handle is not None:
        with contextlib.suppress(RuntimeError):
            cufile_calls.deregister(file.cufile_handle)
    with contextlib.suppress(OSError):
        disk_calls.close(file.fd)
    give_back()
