"""Tools of the disk tests: page-aligned memory, and faults at chosen system calls."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from disk_by_piece import leave_all_to_python

from outcore.kernels.checksum import PAGE_BYTES, Bytes
from outcore.store import disk_calls

CALLS = (
    "create",
    "set_direct",
    "allocate",
    "read_at",
    "write_at",
    "status",
    "forget_cached",
    "close",
    "free_bytes",
)
FAULTS = ("EIO", "ENOSPC", "EINTR", "EINVAL", "short", "one-byte", "eof")


def aligned(num_bytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


def pattern(num_bytes: int, seed: int) -> Bytes:
    memory = aligned(num_bytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return memory


class Faults:
    """Counts the calls of the syscall layer; makes number ``at`` of them go wrong."""

    def __init__(self, patch: pytest.MonkeyPatch, *, at: int = -1, fault: str = "EIO") -> None:
        self.num_calls = 0
        self.struck: str | None = None
        self.paused = False  # neither counts nor strikes
        self._at, self._fault = at, fault
        self._lock = threading.Lock()
        leave_all_to_python(patch)
        for name in CALLS:
            patch.setattr(disk_calls, name, self._wrap(name, getattr(disk_calls, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if self.paused:
                return call(*arguments)
            with self._lock:
                mine = self.num_calls == self._at
                self.num_calls += 1
            if not mine:
                return call(*arguments)
            self.struck = name
            return self._strike(name, call, arguments)

        return wrapped

    def _strike(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "close":  # what follows needs no descriptor, and must not leak one
            call(*arguments)
        if self._fault.startswith("E"):
            code = getattr(errno, self._fault)
            raise OSError(code, os.strerror(code))
        if name not in ("read_at", "write_at"):
            return call(*arguments)
        if self._fault == "eof":
            return 0
        # A transfer that stopped early; what was not transferred is garbage.
        fd, memory, offset = arguments
        moved = min(memory.size, 1 if self._fault == "one-byte" else memory.size // 2 + 100)
        if name == "read_at":
            whole = aligned(memory.size)
            call(fd, whole, offset)
            memory[:moved] = whole[:moved]
            memory[moved:] = 0xEE
        else:
            garbage = aligned(memory.size)
            garbage[:moved] = memory[:moved]
            garbage[moved:] = 0xEE
            call(fd, garbage, offset)
        return moved


__all__ = ["FAULTS", "PAGE_BYTES", "Faults", "aligned", "pattern"]
