"""Records as the page cache shows them, summed: for whoever looks at a file through a map.

A map cannot tell that a drive fails or that a file was cut: the system ends the process. So the
bytes are read first, by calls that return errors, and stay in the page cache for the map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES, Bytes, checksum_pages
from outcore.store import disk_calls
from outcore.store.pieces import OpenFile, failed, read_cached_piece
from outcore.store.record_layout import Record
from outcore.store.scratch_creation import inode_of

_PIECE_BYTES = 1 << 20


def cached_checksums(
    file: OpenFile, records: Sequence[Record], seeds: Sequence[int], *, num_threads: int
) -> list[int]:
    """Return the checksum of each record, read through the page cache."""
    with _opened_again(file) as cached, ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(lambda r, s: _checksum(cached, r, s), records, seeds))


def _checksum(file: OpenFile, record: Record, seed: int) -> int:
    buffer: Bytes = np.empty(min(_PIECE_BYTES, record.num_bytes), dtype=np.uint8)
    total = 0
    for start in range(0, record.num_bytes, _PIECE_BYTES):
        piece = buffer[: record.num_bytes - start]
        read_cached_piece(file, piece, record.offset + start)
        total += checksum_pages(piece, first_page=start // PAGE_BYTES, seed=seed)
    return total % 2**64


@contextlib.contextmanager
def _opened_again(file: OpenFile) -> Iterator[OpenFile]:
    """Yield the file with a descriptor of its own: that of direct I/O goes past the cache."""
    try:
        fd = disk_calls.open_cached(file.path)
    except OSError as error:
        raise failed(error, path=file.path, verb="open", offset=0, num_bytes=0) from error
    try:
        try:
            is_same = inode_of(disk_calls.status(fd)) == inode_of(disk_calls.status(file.fd))
        except OSError as error:
            raise failed(error, path=file.path, verb="examine", offset=0, num_bytes=0) from error
        if not is_same:
            raise StoreError(
                f"{file.path}: another file was put in its place. Keep other programs away from "
                "the scratch directory, and start again.",
                path=file.path,
            )
        yield replace(file, fd=fd, is_direct=False, cufile_handle=None)
    finally:
        with contextlib.suppress(OSError):  # nothing was written
            disk_calls.close(fd)
