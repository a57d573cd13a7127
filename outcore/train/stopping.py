"""Signals: the first asks the run to stop after this step, the second ends it at once.

SIGHUP, of a terminal that went away, only ever asks: it may come twice, or beside another signal.
Under nohup it is ignored, and stays so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """While open, a signal sets ``is_set``; a second SIGINT or SIGTERM ends the process."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        """``tell`` is called with the signal's name, from the main thread, when one arrives."""
        self.signal: signal.Signals | None = None
        self._tell = tell
        self._is_untold = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def is_set(self) -> bool:
        self._tell_once()
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        # Only the main thread may; elsewhere the program around the run decides.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGHUP:
            return
        if self.signal is not None and not self._is_hung_up:
            # Scratch files that stay behind are removed at the next start.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        self._is_untold = True
        # In the middle of a line to the same stream Python refuses another: then it is told when
        # someone asks.
        with contextlib.suppress(RuntimeError):
            self._tell_once()

    def _tell_once(self) -> None:
        if self._is_untold and self._tell is not None and self.signal is not None:
            self._tell(self.signal.name)
        self._is_untold = False

    @property
    def _is_hung_up(self) -> bool:
        return self.signal is signal.SIGHUP
