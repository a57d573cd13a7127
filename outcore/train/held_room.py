"""Room on a disk for what a run ends with, held while it trains: others may fill the rest.

A run asks for that room before its first step, and needs it hours later. Until then a file without
a name takes it, which ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import IO

from outcore.errors import StoreError
from outcore.machine.probe.disk import lies_in_memory
from outcore.units import format_bytes

_REMEDIES = {  # where the disk refuses; other errors are of file systems that cannot hold bytes
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`)",
    errno.EDQUOT: "Make room within your quota",
    errno.ENOSPC: "Free space",
}


class HeldRoom:
    """Bytes of the disk that ``directory`` is on, from its making to ``give_back``.

    Where they cannot be held (a file system that allocates nothing ahead), nothing is: the room was
    there when it was asked for. Of a tmpfs it would be memory. StoreError where the disk refuses.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._file = None if lies_in_memory(directory) else _allocated(directory, num_bytes)

    @property
    def is_held(self) -> bool:
        return self._file is not None

    def give_back(self) -> None:
        """Let others have it; again is no matter."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError), file:
                file.truncate(0)  # a process that was forked meanwhile has it open too


def _allocated(directory: Path, num_bytes: int) -> IO[bytes] | None:
    with contextlib.ExitStack() as until_held:
        try:
            file: IO[bytes] = until_held.enter_context(tempfile.TemporaryFile(dir=directory))
            _allocate(file.fileno(), num_bytes)
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0)
            if remedy is None:
                return None
            raise StoreError(
                f"{directory}: {format_bytes(num_bytes)} for what the run ends with cannot be held "
                f"there: {error.strerror}. {remedy}, or name another --output.",
                path=directory,
            ) from error
        until_held.pop_all()
        return file


def _allocate(fd: int, num_bytes: int) -> None:
    """Not as posix_fallocate, which writes all of it where the file system cannot do it."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:  # only Linux has it
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
