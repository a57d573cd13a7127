"""How a scratch file comes into being: room checked, all of it allocated, direct I/O tried out."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES, Bytes
from outcore.store import cufile_calls, disk_calls
from outcore.store.pieces import OpenFile, failed, read_piece, write_piece
from outcore.units import format_bytes

# What the next start may delete when it finds it in a dead process's directory.
SCRATCH_FILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\.scratch")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def delete_scratch(path: Path, inode: tuple[int, int]) -> None:
    """Delete the file if it is still the one that was created there."""
    with contextlib.suppress(OSError):
        if inode_of(os.lstat(path)) == inode:
            os.unlink(path)


def inode_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def create_scratch(path: Path, num_bytes: int, *, direct: bool) -> OpenFile:
    """Create the file and take all its bytes now, or leave nothing behind.

    Without ``direct``, and where the file system refuses O_DIRECT (at once or at the first I/O),
    the file goes through the page cache.
    """
    # Asked first: on some file systems a refused allocation fills the disk for a moment.
    free_bytes = _free_bytes(path)
    if num_bytes > free_bytes:
        raise _no_room(path, num_bytes, free_bytes)
    try:
        fd = disk_calls.create(path)
    except OSError as error:
        raise failed(error, path=path, verb="create", offset=0, num_bytes=num_bytes) from error
    try:
        _allocate(path, fd, num_bytes)
        is_direct = direct and _try_direct(path, fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            disk_calls.close(fd)
        raise
    return OpenFile(path=path, fd=fd, is_direct=is_direct)


def known_to_cufile(file: OpenFile) -> OpenFile:
    """Return the file registered with cuFile; as it is, with a warning, where that is refused."""
    try:
        return replace(file, cufile_handle=cufile_calls.register(file.fd))
    except RuntimeError as error:
        warnings.warn(
            f"{file.path}: GPUDirect Storage was found by `outcore probe` but does not take this "
            f"file ({error}); it is read through host memory. Run `outcore probe --refresh`.",
            RuntimeWarning,
            stacklevel=2,
        )
        return file


def _allocate(path: Path, fd: int, num_bytes: int) -> None:
    while True:
        try:
            disk_calls.allocate(fd, num_bytes)
            return
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise _no_room(path, num_bytes, _free_bytes(path)) from error
            raise failed(
                error, path=path, verb="allocate", offset=0, num_bytes=num_bytes
            ) from error


def _try_direct(path: Path, fd: int) -> bool:
    """Write and read the first page past the page cache; say whether that is possible here."""
    page: Bytes = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), dtype=np.uint8)  # maps start on a page
    file = OpenFile(path=path, fd=fd, is_direct=True)
    try:
        _set_direct(path, fd, True)
        write_piece(file, page, 0)
        read_piece(file, page, 0)
    except StoreError as error:
        if getattr(error.__cause__, "errno", None) not in _NOT_DIRECT:
            raise
        _set_direct(path, fd, False)
        return False
    return True


def _set_direct(path: Path, fd: int, direct: bool) -> None:
    try:
        disk_calls.set_direct(fd, direct)
    except OSError as error:
        raise failed(error, path=path, verb="try out", offset=0, num_bytes=PAGE_BYTES) from error


def _free_bytes(path: Path) -> int:
    try:
        return disk_calls.free_bytes(path.parent)
    except OSError as error:
        raise failed(error, path=path, verb="find room for", offset=0, num_bytes=0) from error


def _no_room(path: Path, num_bytes: int, free_bytes: int) -> StoreError:
    return StoreError(
        f"{path}: needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} are free. "
        "Free space there, name a larger disk, or train fewer parameters.",
        path=path,
        offset=0,
    )
