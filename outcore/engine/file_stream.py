"""Ranges of a file, mostly one behind the other, through a ring of buffers that is filled ahead.

Past the page cache where the file system can, in large pieces by a few threads, into memory that is
used again and again: new memory for each tensor would cost as much time as the reading.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from outcore.errors import StoreError

PIECE_BYTES = 8 << 20
_NUM_THREADS = 4
_NUM_AHEAD = 6  # pieces


class FileStream:
    """Reads one file. One thread calls; ranges in another order are only slower."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd, self._is_direct = _open(path)
        self._num_bytes = os.fstat(self._fd).st_size
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "outcore-load")
        maps = [mmap.mmap(-1, PIECE_BYTES) for _ in range(_NUM_AHEAD + 2)]
        self._free = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        self._ring: OrderedDict[int, tuple[Tensor, Future[int]]] = OrderedDict()

    def read(self, target: Tensor, start: int) -> None:
        """Fill ``target``, flat bytes, with what the file has from ``start`` on."""
        done = 0
        while done < target.numel():
            piece, within = divmod(start + done, PIECE_BYTES)
            buffer, num_bytes = self._piece(piece)
            size = min(num_bytes - within, target.numel() - done)
            if size <= 0:
                raise StoreError(f"{self.path} ends at byte {start + done}: it was cut short")
            target[done : done + size].copy_(buffer[within : within + size])
            done += size

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._fd)

    def _piece(self, piece: int) -> tuple[Tensor, int]:
        """Return a piece and its size; ask for those that follow."""
        last = min(piece + _NUM_AHEAD, max(piece, (self._num_bytes - 1) // PIECE_BYTES))
        for wanted in range(piece, last + 1):
            if wanted not in self._ring:
                self._ask(wanted, range(piece, last + 1))
        buffer, future = self._ring[piece]
        try:
            return buffer, future.result()
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _ask(self, piece: int, kept: range) -> None:
        if not self._free:
            oldest = next(p for p in self._ring if p not in kept)
            buffer, future = self._ring.pop(oldest)
            with contextlib.suppress(OSError):
                future.exception()  # no thread writes into it any more
            self._free.append(buffer)
        buffer = self._free.pop()
        self._ring[piece] = buffer, self._pool.submit(self._fill, buffer, piece * PIECE_BYTES)

    def _fill(self, buffer: Tensor, offset: int) -> int:
        """Read until the piece is full or the file ends; return how much that was."""
        memory, done = buffer.numpy().data, 0
        while done < PIECE_BYTES:
            count = os.preadv(self._fd, [memory[done:]], offset + done)
            done += count
            # A short read ends off a page only where the file does.
            if count == 0 or (self._is_direct and done % mmap.PAGESIZE):
                break
        return done


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    try:
        if direct:
            with contextlib.suppress(OSError):  # EINVAL: this file system has none
                fd = os.open(path, flags | direct)
                try:
                    os.preadv(fd, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
                except OSError:
                    os.close(fd)
                    raise
                return fd, True
        return os.open(path, flags), False
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
