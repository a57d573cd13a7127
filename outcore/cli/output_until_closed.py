"""A stream to print to while somebody reads: one that is closed does not end what is printed about.

A pipe's reader may go away (`| head`), or a terminal, or the disk of a log may be full.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable
from typing import IO, Any, cast

from rich.console import Console


def outlive_its_reader(console: Console) -> None:
    """Let a run that prints to ``console`` stop with a checkpoint when nobody reads it any more."""
    console.file = cast(IO[str], OutputUntilClosed(console.file, _stop_the_run))


def _stop_the_run(error: OSError) -> None:
    """End as if the terminal had been closed; a disk that is full costs the log alone."""
    if error.errno not in (errno.EPIPE, errno.EIO):
        return
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nothing is trained yet
        raise SystemExit(1)
    os.kill(os.getpid(), signal.SIGHUP)


class OutputUntilClosed:
    """A text stream that drops what is written once that fails; ``on_closed`` is then told why."""

    def __init__(self, stream: IO[str], on_closed: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._on_closed = on_closed
        self._is_closed = False
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        if not self._is_closed:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._close(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_closed:
            try:
                self._stream.flush()
            except OSError as error:
                self._close(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _close(self, error: OSError) -> None:
        with self._lock:  # a live display writes from a thread of its own
            if self._is_closed:
                return
            self._is_closed = True
        # What is buffered would fail again when the process ends, and change its exit status.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        self._on_closed(error)
