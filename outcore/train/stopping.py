"""Signals: the first asks the run to stop after this step, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While open, SIGINT and SIGTERM set ``is_set``; a second one ends the process."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        """``tell`` is called with the signal's name, from the main thread, when one arrives."""
        self.signal: signal.Signals | None = None
        self._tell = tell
        self._before: dict[signal.Signals, object] = {}

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        # Only the main thread may; elsewhere the program around the run decides.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
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
        if self.signal is not None:
            # Scratch files that stay behind are removed at the next start.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if self._tell is not None:
            self._tell(self.signal.name)
