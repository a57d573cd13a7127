"""One piece of a file, read or written in full, or a StoreError that says where and what to do.

A piece is a range of whole pages in page-aligned host memory, or in device memory where the disk
reaches it. Owns the loop over short transfers; knows nothing of records, checksums or threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES, Bytes
from outcore.store import cufile_calls, disk_calls

_MAX_STALLS = 8
Memory = TypeVar("Memory", "Bytes", "DeviceBytes")

_REMEDIES = {
    errno.ENOSPC: "The disk is full: free space there, or name another disk.",
    errno.EDQUOT: "The quota is used up: free space there, or name another disk.",
    errno.EIO: "The drive failed: see dmesg, and name another disk.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or name another file system.",
    errno.EROFS: "Name a disk that can be written.",
    errno.EEXIST: "Two scratch files of one directory need two names.",
    errno.EACCES: "Name a directory that this user may write to.",
    errno.ENOENT: "Keep other programs away from the scratch directory, and start again.",
}


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """An open scratch file, as far as I/O needs to know it."""

    path: Path
    fd: int
    is_direct: bool  # whether I/O bypasses the page cache
    cufile_handle: int | None = None  # with which the disk reads into device memory


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """A range of device memory; ``owner`` keeps it alive."""

    owner: Tensor
    start: int
    size: int

    @classmethod
    def of(cls, memory: Tensor) -> DeviceBytes:
        return cls(owner=memory, start=0, size=memory.numel() * memory.itemsize)

    @property
    def address(self) -> int:
        return self.owner.data_ptr() + self.start

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, end, _ = part.indices(self.size)
        return DeviceBytes(owner=self.owner, start=self.start + start, size=end - start)


def read_piece(file: OpenFile, target: Bytes, offset: int) -> None:
    _transfer(file, "read", disk_calls.read_at, target, offset)
    _forget_cached(file, offset, target.size)


def read_cached_piece(file: OpenFile, target: Bytes, offset: int) -> None:
    """Read a piece and leave it in the page cache, for somebody who looks at it next."""
    _transfer(file, "read", disk_calls.read_at, target, offset)


def write_piece(file: OpenFile, source: Bytes, offset: int) -> None:
    _transfer(file, "write", disk_calls.write_at, source, offset)
    _forget_cached(file, offset, source.size)


def read_piece_to_device(file: OpenFile, target: DeviceBytes, offset: int) -> None:
    handle, device = file.cufile_handle, target.owner.device
    assert handle is not None

    def read_at(_: int, memory: DeviceBytes, at: int) -> int:
        return cufile_calls.read_at(handle, memory.address, memory.size, at)

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _transfer(file, "read", read_at, target, offset)


def failed(error: OSError, *, path: Path, verb: str, offset: int, num_bytes: int) -> StoreError:
    """Return the StoreError of a refused system call."""
    reason = os.strerror(error.errno) if error.errno else str(error.strerror or error)
    remedy = _REMEDIES.get(error.errno or 0, "Name another disk.")
    return StoreError(
        f"{path}: cannot {verb} {num_bytes} bytes at offset {offset}: {reason}. {remedy}",
        path=path,
        offset=offset,
    )


def _transfer(
    file: OpenFile, verb: str, call: Callable[[int, Memory, int], int], memory: Memory, offset: int
) -> None:
    done = num_stalls = 0
    while done < memory.size:
        try:
            moved = call(file.fd, memory[done:], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise failed(
                error,
                path=file.path,
                verb=verb,
                offset=offset + done,
                num_bytes=memory.size - done,
            ) from error
        if moved == memory.size - done:
            break
        # Short. What is left must start on a page again, or O_DIRECT refuses it.
        whole = (done + moved) // PAGE_BYTES * PAGE_BYTES
        num_stalls = num_stalls + 1 if whole <= done else 0
        if moved == 0 or num_stalls > _MAX_STALLS:
            raise _stuck(file, verb, offset + done, memory.size - done, moved)
        done = max(done, whole)


def _forget_cached(file: OpenFile, offset: int, num_bytes: int) -> None:
    if not file.is_direct:
        with contextlib.suppress(OSError):  # advice only
            disk_calls.forget_cached(file.fd, offset, num_bytes)


def _stuck(file: OpenFile, verb: str, offset: int, num_bytes: int, moved: int) -> StoreError:
    if verb == "read":
        what = f"the file ends {num_bytes - moved} bytes early: something cut it"
    else:
        what = f"the system takes {moved} bytes and no more"
    return StoreError(
        f"{file.path}: cannot {verb} {num_bytes} bytes at offset {offset}: {what}. "
        "Keep other programs away from the scratch directory, and start again.",
        path=file.path,
        offset=offset,
    )
