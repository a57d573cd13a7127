"""Files that are there in full or not at all: synced before they are named, locked while made."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

from outcore.errors import StoreError
from outcore.units import format_bytes

_BUFFER_BYTES = 1 << 20


class GrowingFile:
    """A new file that only grows, and knows its size and checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.crc32 = 0
        self._buffer = bytearray()
        with _clear_errors(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def append(self, data: bytes) -> None:
        self._buffer += data
        self.num_bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> None:
        """Return when the bytes are on the disk."""
        self._flush()
        with _clear_errors(self.path):
            sync(self._fd)
        self._close()

    def abandon(self) -> None:
        """Delete the file, whatever state it is in."""
        self._close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _flush(self) -> None:
        with _clear_errors(self.path), memoryview(self._buffer) as rest:
            done = 0
            while done < len(rest):
                done += write(self._fd, rest[done:])
        self._buffer.clear()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# By themselves, so that tests can make them fail.
def write(fd: int, data: memoryview) -> int:
    return os.write(fd, data)


def sync(fd: int) -> None:
    os.fsync(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path``: before a crash the old one, after it the new one."""
    file = GrowingFile(path.with_name(f"{path.name}.{secrets.token_hex(4)}.new"))
    try:
        file.append(data)
        file.finish()
        with _clear_errors(path):
            file.path.replace(path)
            sync_directory(path.parent)
    except BaseException:
        file.abandon()
        raise


def sync_directory(path: Path) -> None:
    """Return when the names in a directory are on the disk."""
    with _clear_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of this name, alone among all processes; a killed one lets go of it."""
    with _clear_errors(path):
        fd = _lock(path)
    try:
        yield
    finally:
        # While it is still held: whoever waits finds that the name is gone, and starts again.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(fd)


def _lock(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_named(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path}: {_what_to_do(error, path)}", path=path) from error


def _what_to_do(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = ""
        with contextlib.suppress(OSError):
            status = os.statvfs(path.parent)
            free = f" ({format_bytes(status.f_bavail * status.f_frsize)} are free)"
        return f"the disk is full{free}. Make room, or name another directory"
    return f"cannot be written ({error}). Name another directory"
