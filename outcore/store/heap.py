"""Memory that the C library keeps after tensors were freed, given back when it gets short.

A CPU's tensors come from the C library. Where small ones stay between large ones that go, it keeps
the holes, and a process grows beyond what its books say. Giving them back costs time, since the
next tensors have to get new pages: only a process that would pass its limit does.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from outcore.store.memory_limits import anonymous_bytes

_SHARE = 0.95  # of the limit: what is freed next was taken before


class Heap:
    """Keeps the memory of the process within ``limit_bytes``, as far as holes make it."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes

    def settle(self) -> None:
        """Give holes back if the process is about to pass its limit; called between blocks."""
        if self._limit_bytes is None or anonymous_bytes() <= _SHARE * self._limit_bytes:
            return
        if (trim := _trim()) is not None:
            trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``; other C libraries have none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda padding: int(trim(padding))
