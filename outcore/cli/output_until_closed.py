"""A stream to print to while somebody reads, and what a command does once nobody can.

A pipe's reader may go away (`| head`), or a terminal, or the disk that is printed to may be full.
A training run goes on to a checkpoint, or to its end; any other command was there for what it
prints, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, TextIO, cast

from rich.console import Console

from outcore.cli.report import say_error

LOST_STATUS = 2  # verify's 1 says that something differs


def end_with_standard_output() -> None:
    """Let the command end, with a line at most, when its standard output cannot be written."""
    if sys.stdout is not None:  # which it is where the caller closed it
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Where the locale has no bars and no "×", a question mark stands for each.
            sys.stdout.reconfigure(errors="replace")
        sys.stdout = cast(TextIO, OutputUntilClosed(sys.stdout, _end_the_command))


def _end_the_command(error: OSError) -> None:
    """End at once; a reader that has gone has read what it wanted, and is told nothing."""
    if error.errno == errno.EPIPE:
        raise SystemExit(1)
    say_error(
        f"standard output cannot be written: {error.strerror}. Free space there, or send it "
        "elsewhere."
    )
    raise SystemExit(LOST_STATUS)


def outlive_its_reader(console: Console) -> None:
    """Let a run that prints to ``console`` stop with a checkpoint when nobody reads it any more."""
    stream = console.file
    if isinstance(stream, OutputUntilClosed):
        stream = stream.stream  # or the command would end before the run can
    console.file = cast(IO[str], OutputUntilClosed(stream, _stop_the_run))


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
        self.stream = stream
        self._on_closed = on_closed
        self._is_closed = False
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        if not self._is_closed:
            try:
                return self.stream.write(text)
            except OSError as error:
                self._close(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_closed:
            try:
                self.stream.flush()
            except OSError as error:
                self._close(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _close(self, error: OSError) -> None:
        with self._lock:  # a live display writes from a thread of its own
            if self._is_closed:
                return
            self._is_closed = True
        # What is buffered would fail again when the process ends, and change its exit status.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        self._on_closed(error)
