"""Bytes of a checkpoint's file, moved in full, or a StoreError that says where and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from outcore.checkpoint import calls
from outcore.errors import StoreError
from outcore.kernels.checksum import Bytes
from outcore.store.pieces import failed

Result = TypeVar("Result")
_REMEDIES = {
    errno.ENOSPC: ". The disk is full: free space there, or name another folder",
    errno.EDQUOT: ". The quota is used up: free space there, or name another folder",
    errno.EROFS: ". The disk is mounted read-only: name another folder",
    errno.EACCES: ". Name a folder that you may write to",
    errno.EEXIST: ". What has this name is no folder: move it away, or name another folder",
    errno.EIO: ". The drive reports an error: name another disk",
}


def called(verb: str, path: Path, call: Callable[[], Result], num_bytes: int = 0) -> Result:
    """Make a system call; a refusal is a StoreError that names ``path``."""
    while True:
        try:
            return call()
        except InterruptedError:
            continue
        except OSError as error:
            if num_bytes:
                raise failed(error, path=path, verb=verb, offset=0, num_bytes=num_bytes) from error
            reason = os.strerror(error.errno) if error.errno else str(error)
            remedy = _REMEDIES.get(error.errno or 0, "")
            raise StoreError(f"cannot {verb} {path}: {reason}{remedy}", path=path) from error


def write_all(path: Path, fd: int, source: Bytes, offset: int) -> None:
    _move("write", calls.write_at, path, fd, source, offset)


def read_all(path: Path, fd: int, target: Bytes, offset: int) -> None:
    _move("read", calls.read_at, path, fd, target, offset)
    with contextlib.suppress(OSError):  # advice only
        calls.forget_cached(fd, offset, target.size)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Yield an ordinary file's descriptor and its bytes; links and devices are refused."""
    fd = called("open", path, lambda: calls.open_to_read(path))
    try:
        found = called("examine", path, lambda: calls.status(fd))
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{path} is no ordinary file", path=path)
        yield fd, found.st_size
    finally:
        with contextlib.suppress(OSError):  # nothing was written
            calls.close(fd)


def _move(
    verb: str,
    call: Callable[[int, Bytes, int], int],
    path: Path,
    fd: int,
    memory: Bytes,
    offset: int,
) -> None:
    done = 0
    while done < memory.size:
        try:
            moved = call(fd, memory[done:], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise failed(
                error, path=path, verb=verb, offset=offset + done, num_bytes=memory.size - done
            ) from error
        if moved <= 0:
            what = "the file ends there" if verb == "read" else "the system takes no more"
            raise StoreError(
                f"{path}: cannot {verb} {memory.size - done} bytes at offset {offset + done}: "
                f"{what}",
                path=path,
                offset=offset + done,
            )
        done += moved


def written_file(path: Path, write: Callable[[int], Result]) -> Result:
    """Create a file, let ``write`` fill it, sync it; leaves nothing behind if any of it fails."""
    fd = called("create", path, lambda: calls.create(path))
    try:
        result = write(fd)
        called("sync", path, lambda: calls.sync(fd))
    except BaseException:
        with contextlib.suppress(OSError):
            calls.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    with contextlib.suppress(OSError):  # it is synced: closing can lose nothing any more
        calls.close(fd)
    return result
