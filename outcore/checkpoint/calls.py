"""Every system call on a checkpoint's files and folders, and nothing else.

One layer, so that a test can make any one call fail, or end the process at it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from outcore.kernels.checksum import Bytes

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def make_directories(path: Path) -> None:
    """Make a directory and those that it lies in; a power cut takes none of the names away."""
    if path.is_dir():
        return
    if not path.parent.exists():
        make_directories(path.parent)
    path.mkdir(mode=0o755, exist_ok=True)
    with contextlib.suppress(PermissionError):  # of a parent that may be written and not read
        sync_directory(path.parent)


def make_directory(path: Path) -> None:
    path.mkdir(mode=0o755)


def list_names(path: Path) -> list[str]:
    """Return the names of real directories in ``path``: links are no checkpoints."""
    with os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_LINKS, 0o644)


def open_to_read(path: Path) -> int:
    # Without O_NONBLOCK a pipe that has the file's name would never open.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _NO_LINKS)


def lock(path: Path) -> int:
    """Return a descriptor that holds ``path`` for this process; BlockingIOError if another does.

    A lock of this kind ends with the process, however that ends, and no child inherits it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _NO_LINKS, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def status(fd: int) -> os.stat_result:
    return os.fstat(fd)


def allocate(fd: int, num_bytes: int) -> None:
    os.posix_fallocate(fd, 0, num_bytes)


def read_at(fd: int, target: Bytes, offset: int) -> int:
    return os.preadv(fd, [target.data], offset)


def write_at(fd: int, source: Bytes, offset: int) -> int:
    return os.pwritev(fd, [source.data], offset)


def forget_cached(fd: int, offset: int, num_bytes: int) -> None:
    """Let the page cache drop a range that will not be needed soon."""
    os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def sync(fd: int) -> None:
    os.fsync(fd)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def remove_tree(path: Path) -> None:
    shutil.rmtree(path)


def close(fd: int) -> None:
    os.close(fd)


def free_bytes(path: Path) -> int:
    """Return what an ordinary user may still take of the file system that ``path`` is on."""
    usage = os.statvfs(path)
    return usage.f_bavail * usage.f_frsize


def size_of_tree(path: Path) -> int:
    """Return the bytes of the files in a directory."""
    with os.scandir(path) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
