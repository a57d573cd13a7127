"""Room on a disk for what a run ends with, held while it trains: others may fill the rest.

A run asks for that room before its first step, and needs it hours later. Until then a file without
a name takes it, which ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from pathlib import Path
from typing import IO

from outcore.machine.probe.disk import lies_in_memory


class HeldRoom:
    """Bytes of the disk that ``directory`` is on, from its making to ``give_back``.

    Where they cannot be held (a file system that allocates nothing ahead), nothing is: the room was
    there when it was asked for. Of a tmpfs it would be memory.
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
    with contextlib.suppress(OSError), contextlib.ExitStack() as until_held:
        file: IO[bytes] = until_held.enter_context(tempfile.TemporaryFile(dir=directory))
        # Not posix_fallocate, which writes all of it where the file system cannot do it.
        start, size = ctypes.c_int64(0), ctypes.c_int64(num_bytes)
        if ctypes.CDLL(None).fallocate(file.fileno(), 0, start, size) == 0:
            until_held.pop_all()
            return file
    return None
