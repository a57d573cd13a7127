"""Every system call that makes a checkpoint durable, and nothing else.

One layer, so that a test can make any one call fail.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def make_directory(path: Path) -> None:
    path.mkdir(mode=0o755)


def create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o644)


def allocate(fd: int, num_bytes: int) -> None:
    os.posix_fallocate(fd, 0, num_bytes)


def write(fd: int, data: bytes) -> int:
    return os.write(fd, data)


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
