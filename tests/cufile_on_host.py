"""cuFile for a machine without it: files are read into the memory of the CPU device."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import pytest

from outcore.store import cufile_calls

Damage = Callable[[bytearray, int], int]  # (what was read, its offset) → how many bytes to tell


class CufileOnHost:
    """Stands in for cuFile's calls; ``damage`` may change what a read brings, or raise."""

    def __init__(self, patch: pytest.MonkeyPatch, damage: Damage | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.num_reads = 0
        self.damage = damage
        patch.setattr(cufile_calls, "register", self.register)
        patch.setattr(cufile_calls, "deregister", self.registered.pop)
        patch.setattr(cufile_calls, "read_at", self.read_at)

    def register(self, fd: int) -> int:
        handle = 1000 + fd
        assert handle not in self.registered
        self.registered[handle] = fd
        return handle

    def read_at(self, handle: int, address: int, num_bytes: int, offset: int) -> int:
        self.num_reads += 1
        memory = mmap.mmap(-1, num_bytes)  # on a page, as O_DIRECT wants it
        count = os.preadv(self.registered[handle], [memory], offset)
        read = bytearray(memory[:count])
        told = count if self.damage is None else self.damage(read, offset)
        ctypes.memmove(address, bytes(read), count)
        return told
