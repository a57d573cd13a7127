"""Bytes of a file to where they belong in memory, through a small buffer, past the interpreter.

The library does what goes well. What does not, and everything where there is no library, is left to
the caller.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .library import CopyRunStruct, check_status, library


@dataclass(frozen=True, kw_only=True)
class CopyRun:
    """Bytes from ``start`` on, of those that are read, fill ``memory``: contiguous, on the host."""

    start: int
    memory: Tensor


def read_and_copy(
    fd: int, offset: int, num_bytes: int, *, buffer: Tensor, runs: Sequence[CopyRun]
) -> int:
    """Read bytes of a file from ``offset`` on; return how many of them were read and handed out.

    ``buffer`` is of whole pages, and aligned to them where the file is read directly.
    """
    loaded = library()
    if loaded is None:
        return 0
    structs = (CopyRunStruct * len(runs))(
        *(
            CopyRunStruct(
                start=run.start, end=run.start + run.memory.nbytes, memory=run.memory.data_ptr()
            )
            for run in runs
        )
    )
    done = ctypes.c_int64()
    check_status(
        loaded.oc_read_and_copy(
            fd,
            offset,
            num_bytes,
            buffer.data_ptr(),
            buffer.nbytes,
            structs,
            len(runs),
            ctypes.byref(done),
        )
    )
    return done.value
