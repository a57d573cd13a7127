"""A directory for this process's scratch files, and the removal of what dead processes left.

A directory is alive as long as its lock file is locked (flock), which the kernel undoes when the
process ends in whatever way. Nothing is deleted but regular files of our names in directories of
our name and owner; links are not followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import weakref
from pathlib import Path
from types import TracebackType

from outcore.errors import StoreError
from outcore.store.scratch_creation import SCRATCH_FILE_NAME

_DIRECTORY_NAME = re.compile(r"outcore-scratch-\d+-[0-9a-f]{8}")
_LOCK_NAME = "lock"
_MAX_TRIES = 100


class ScratchDirectory:
    """A new directory in ``parent`` that goes with this process, or with ``close``."""

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        parent = Path(parent).absolute()  # the working directory may change
        if not parent.is_dir():  # not created: it may be a disk that is not mounted
            raise ValueError(f"the scratch directory's parent {parent} is not a directory")
        remove_leftovers(parent)
        self.path, lock_fd = _create_locked(parent)
        self._remove = weakref.finalize(self, _remove_own, self.path, lock_fd, os.getpid())

    def close(self) -> None:
        """Delete the directory with the scratch files in it; anything else in it stays."""
        self._remove()

    def __enter__(self) -> ScratchDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove the scratch directories of dead processes in ``parent``; return those that are gone.

    What cannot be opened, locked or deleted is left as it is: it may belong to somebody.
    """
    removed = []
    for path in sorted(parent.iterdir()):
        if _DIRECTORY_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if _remove_if_dead(path):
                    removed.append(path)
    return removed


def _create_locked(parent: Path) -> tuple[Path, int]:
    for _ in range(_MAX_TRIES):
        path = parent / f"outcore-scratch-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.mkdir(mode=0o700)
            fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except (FileExistsError, FileNotFoundError):
            continue  # the name is taken, or another start swept the directory while it was empty
        except OSError as error:
            raise _cannot_create(path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 0:
                return path, fd
        except BlockingIOError:
            pass
        except OSError as error:
            _remove_own(path, fd, os.getpid())
            raise _cannot_create(path, error) from error
        os.close(fd)  # another start took it for a leftover before it was locked
    raise StoreError(f"{parent}: no scratch directory after {_MAX_TRIES} tries.", path=parent)


def _cannot_create(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot make and lock a scratch directory: {error.strerror}. Name a directory on "
        "a local disk that this user may write to.",
        path=path,
    )


def _remove_if_dead(path: Path) -> bool:
    """Remove the directory unless its owner lives; return whether it is gone."""
    directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory_fd).st_uid != os.geteuid():
            return False
        try:
            lock_fd = os.open(_LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory_fd)
        except FileNotFoundError:
            # Died before it was locked, or swept but for foreign files. rmdir takes it only if it
            # is empty; an owner that is just about to lock it notices, and makes another.
            os.rmdir(path)
            return True
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: alive
            _remove_contents(directory_fd)
        finally:
            os.close(lock_fd)
    finally:
        os.close(directory_fd)
    os.rmdir(path)
    return True


def _remove_contents(directory_fd: int) -> None:
    """Delete the scratch files, and then the lock: without it, what is left is not ours."""
    for name in os.listdir(directory_fd):
        if SCRATCH_FILE_NAME.fullmatch(name):
            _unlink_regular(name, directory_fd)
    _unlink_regular(_LOCK_NAME, directory_fd)


def _unlink_regular(name: str, directory_fd: int) -> None:
    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    if stat.S_ISREG(status.st_mode):
        os.unlink(name, dir_fd=directory_fd)


def _remove_own(path: Path, lock_fd: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked child that exits must not delete its parent's files
        return
    with contextlib.suppress(OSError):
        directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _remove_contents(directory_fd)
        finally:
            os.close(directory_fd)
        os.rmdir(path)
    with contextlib.suppress(OSError):
        os.close(lock_fd)
