"""Records between page-aligned memory and a file, in pieces on threads that no lock stops.

The library reads or writes and sums what goes well. What does not, and everything where there is no
library, is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .checksum import Bytes
from .library import RecordStruct, check_status, library


@dataclass(frozen=True, kw_only=True)
class Part:
    """Whole pages in memory and at ``offset`` of a file; ``seed``: see checksum_pages."""

    memory: Bytes
    offset: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What became of a part: the checksum of what moved, and the starts of pieces that did not."""

    checksum: int
    left: list[int]


def read_parts(fd: int, parts: Sequence[Part], *, piece_bytes: int, threads: int) -> list[Moved]:
    """Read each part of a file into its memory, as far as nothing is in the way."""
    loaded = library()
    call = None if loaded is None else loaded.oc_read_records
    return _move(call, fd, parts, piece_bytes, threads)


def write_parts(fd: int, parts: Sequence[Part], *, piece_bytes: int, threads: int) -> list[Moved]:
    """Write each part of a file from its memory, as far as nothing is in the way."""
    loaded = library()
    call = None if loaded is None else loaded.oc_write_records
    return _move(call, fd, parts, piece_bytes, threads)


def _move(
    call: Callable[..., int] | None,
    fd: int,
    parts: Sequence[Part],
    piece_bytes: int,
    threads: int,
) -> list[Moved]:
    starts = [range(0, part.memory.size, piece_bytes) for part in parts]
    if call is None:
        return [Moved(checksum=0, left=list(all_)) for all_ in starts]
    is_done = [np.zeros(len(all_), dtype=np.uint8) for all_ in starts]
    records = (RecordStruct * len(parts))(
        *(
            RecordStruct(
                memory=part.memory.ctypes.data,
                num_bytes=part.memory.size,
                offset=part.offset,
                seed=part.seed % 2**64,
                is_done=done.ctypes.data,
            )
            for part, done in zip(parts, is_done, strict=True)
        )
    )
    check_status(call(fd, records, len(parts), piece_bytes, threads))
    return [
        Moved(
            checksum=record.sum,
            left=[start for start, is_here in zip(all_, done, strict=True) if not is_here],
        )
        for record, all_, done in zip(records, starts, is_done, strict=True)
    ]
