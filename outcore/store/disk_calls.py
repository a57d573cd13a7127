"""Every system call that touches a scratch file's bytes, and nothing else.

One layer, so that a test can make any one call fail. Each drops the GIL while it waits;
``read_parts`` and ``write_parts`` do so once for many requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from outcore.kernels.checksum import Bytes
from outcore.kernels.disk_pieces import read_parts, write_parts

__all__ = [
    "allocate",
    "close",
    "create",
    "forget_cached",
    "free_bytes",
    "open_cached",
    "read_at",
    "read_parts",
    "set_direct",
    "status",
    "write_at",
    "write_parts",
]


def create(path: Path) -> int:
    """Create and open a file; EEXIST where anything, also a dangling link, has its name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o600)


def open_cached(path: Path) -> int:
    """Open a file to be read through the page cache, from record to record."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    with contextlib.suppress(OSError):  # advice only: to read further ahead
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def set_direct(fd: int, direct: bool) -> None:
    """Make I/O bypass the page cache, or not; EINVAL where the file system cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def allocate(fd: int, num_bytes: int) -> None:
    os.posix_fallocate(fd, 0, num_bytes)


def read_at(fd: int, target: Bytes, offset: int) -> int:
    return os.preadv(fd, [target.data], offset)


def write_at(fd: int, source: Bytes, offset: int) -> int:
    return os.pwritev(fd, [source.data], offset)


def status(fd: int) -> os.stat_result:
    return os.fstat(fd)


def forget_cached(fd: int, offset: int, num_bytes: int) -> None:
    """Let the page cache drop a range that will not be needed soon."""
    os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def close(fd: int) -> None:
    os.close(fd)


def free_bytes(path: Path) -> int:
    """Return what an ordinary user may still take of the file system that ``path`` is on."""
    usage = os.statvfs(path)
    return usage.f_bavail * usage.f_frsize
