"""Records between memory and an open file: in one call, and piece by piece what that left over.

Owns the threads of the second way. Knows nothing of what a record should contain: it moves bytes
and returns their checksums.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES, Bytes, checksum_pages
from outcore.kernels.disk_pieces import Moved, Part
from outcore.store import disk_calls
from outcore.store.pieces import (
    DeviceBytes,
    Memory,
    OpenFile,
    read_piece,
    read_piece_to_device,
    write_piece,
)
from outcore.store.record_layout import Record, page_aligned_bytes

MIN_PIECE_BYTES = 1 << 20

# (file, memory, offset in the file, first page in the record, seed) → checksum
_Piece = Callable[[OpenFile, Memory, int, int, int], int]


class _AllParts(Protocol):
    """``disk_calls.read_parts`` or ``write_parts``."""

    def __call__(
        self, fd: int, parts: Sequence[Part], *, piece_bytes: int, threads: int
    ) -> list[Moved]: ...


@dataclass(frozen=True, kw_only=True)
class Order:
    """A record to move, its memory, and the seed of its checksum."""

    record: Record
    memory: Bytes
    seed: int


class RecordTransfer:
    """Moves records of one file in requests of at most ``piece_bytes``."""

    def __init__(self, file: OpenFile, *, num_threads: int, piece_bytes: int) -> None:
        self._file = file
        self._num_threads = num_threads
        self._piece_bytes = piece_bytes
        # Apart, or the pieces of a large write would stand before those of every read.
        self._readers = ThreadPoolExecutor(num_threads, "outcore-disk-read")
        self._writers = ThreadPoolExecutor(num_threads, "outcore-disk-write")

    def read(self, orders: Sequence[Order], num_threads: int) -> list[int]:
        """Fill the memory of each; return the checksums of what came."""
        return self._move(disk_calls.read_parts, self._readers, read_and_sum, orders, num_threads)

    def write(self, orders: Sequence[Order], num_threads: int) -> list[int]:
        """Write the memory of each; return its checksums."""
        return self._move(
            disk_calls.write_parts, self._writers, _sum_and_write, orders, num_threads
        )

    def read_to_device(self, record: Record, memory: DeviceBytes) -> None:
        """Fill device memory; its checksum is for whoever can look at it."""
        piece_bytes = self._request_bytes(record.num_bytes, self._num_threads)
        starts = range(0, memory.size, piece_bytes)
        self._by_piece(self._readers, _read_to_device, record, memory, 0, starts, piece_bytes)

    def shutdown(self) -> None:
        """Let the threads end."""
        self._readers.shutdown(wait=False)
        self._writers.shutdown(wait=False)

    def _move(
        self,
        move: _AllParts,
        pool: ThreadPoolExecutor,
        work: _Piece[Bytes],
        orders: Sequence[Order],
        num_threads: int,
    ) -> list[int]:
        num_bytes = sum(order.record.num_bytes for order in orders)
        piece_bytes = self._request_bytes(num_bytes, num_threads)
        parts = [
            Part(memory=order.memory, offset=order.record.offset, seed=order.seed)
            for order in orders
        ]
        moved = move(self._file.fd, parts, piece_bytes=piece_bytes, threads=num_threads)
        checksums = []
        for order, done in zip(orders, moved, strict=True):
            if not self._file.is_direct:
                with contextlib.suppress(OSError):  # advice only
                    disk_calls.forget_cached(
                        self._file.fd, order.record.offset, order.record.num_bytes
                    )
            rest = self._by_piece(
                pool, work, order.record, order.memory, order.seed, done.left, piece_bytes
            )
            checksums.append((done.checksum + rest) % 2**64)
        return checksums

    def _by_piece(
        self,
        pool: ThreadPoolExecutor,
        work: _Piece[Memory],
        record: Record,
        memory: Memory,
        seed: int,
        starts: Iterable[int],
        piece_bytes: int,
    ) -> int:
        """Do ``work`` on some pieces of a record and return the sum of the checksums."""
        futures: list[Future[int]] = []
        try:
            for start in starts:
                piece = memory[start : start + piece_bytes]
                futures.append(
                    pool.submit(
                        work, self._file, piece, record.offset + start, start // PAGE_BYTES, seed
                    )
                )
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        except RuntimeError as error:  # closed meanwhile, or no thread can be started
            what = f"no thread takes the work ({error})"
            raise record_error(self._file.path, record, what) from error
        finally:
            # Nobody gets the memory or the record back while a thread still works on it.
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
        for future in futures:
            if not future.cancelled() and (failure := future.exception()) is not None:
                raise failure
        return sum(future.result() for future in futures) % 2**64

    def _request_bytes(self, num_bytes: int, num_threads: int) -> int:
        """Return the bytes of one request: small enough for every thread to have one."""
        share = page_aligned_bytes(-(-num_bytes // num_threads))
        return min(self._piece_bytes, max(MIN_PIECE_BYTES, share))


def record_error(path: Path, record: Record, what: str) -> StoreError:
    return StoreError(
        f"{path}: record {record.index} at offset {record.offset} ({record.num_bytes} bytes): "
        f"{what}.",
        path=path,
        offset=record.offset,
    )


# Functions and not methods: a thread that is done with a piece must not hold the last reference to
# anything whose release would then run on it.


def read_and_sum(file: OpenFile, target: Bytes, offset: int, first_page: int, seed: int) -> int:
    """Read a piece of a record, and return its checksum."""
    read_piece(file, target, offset)
    return checksum_pages(target, first_page=first_page, seed=seed)


def _read_to_device(
    file: OpenFile, target: DeviceBytes, offset: int, first_page: int, seed: int
) -> int:
    read_piece_to_device(file, target, offset)
    return 0


def _sum_and_write(file: OpenFile, source: Bytes, offset: int, first_page: int, seed: int) -> int:
    checksum = checksum_pages(source, first_page=first_page, seed=seed)
    write_piece(file, source, offset)
    return checksum
