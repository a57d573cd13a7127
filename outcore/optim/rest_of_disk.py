"""How much a disk can write between a step's last read and the next step: learned as it goes.

Writes that are held back for that time are free; more of them would hold up the gradients whose
memory they have. Only time depends on it, no value.
"""

from __future__ import annotations

import math
import time

USED = 0.9  # part of the time that is to be filled, so that nothing waits
_TOO_MUCH = 0.95
_LESS = 0.8
_MORE = 2.0  # at most, from one step to the next: a pause may have been an evaluation's


class RestOfDisk:
    """Takes the times of one step after the other; ``limit_bytes`` is what to hold back in each."""

    def __init__(self) -> None:
        self.limit_bytes = math.inf
        self._num_bytes = 0
        self._began_s = math.nan
        self._written_s: float | None = None

    def begin(self, num_bytes: int) -> None:
        """Say that all is read, and so many bytes are written now."""
        self._num_bytes, self._began_s, self._written_s = num_bytes, time.perf_counter(), None

    def written(self) -> None:
        self._written_s = time.perf_counter()

    def end(self) -> None:
        """Say that the next step begins."""
        if not self._num_bytes:
            return
        rest_s = time.perf_counter() - self._began_s
        taken_s = math.inf if self._written_s is None else self._written_s - self._began_s
        if taken_s > _TOO_MUCH * rest_s:
            self.limit_bytes = _LESS * self._num_bytes
        else:
            grown = min(_MORE, USED * rest_s / taken_s) if taken_s > 0 else _MORE
            self.limit_bytes = grown * self._num_bytes
        self._num_bytes = 0
