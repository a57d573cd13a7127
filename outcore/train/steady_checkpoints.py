"""Checkpoints of a run that goes on when one of them fails.

A disk that is full for a while must not end a run, whose state is nowhere else then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.errors import LaneError, StoreError

Values = Callable[[], dict[str, Any]]


class SteadyCheckpoints:
    """Tells of what could not be written, and writes the next one in its time."""

    def __init__(
        self, checkpoints: AsyncCheckpoints, *, saved_step: int | None, tell: Callable[[str], None]
    ) -> None:
        """``saved_step``: that of the newest checkpoint there is."""
        self._checkpoints = checkpoints
        self._saved_step = saved_step
        self._tell = tell

    def begin(self, step: int, values: Values) -> None:
        """Begin a checkpoint; training goes on while it is written, where there is room."""
        self._wait()
        try:
            self._begin(step, values)
        except StoreError as error:
            self._failed(error)

    def write(self, step: int, values: Values) -> None:
        """Return when a checkpoint of this step is there; StoreError if it cannot be."""
        self._wait()
        self._begin(step, values)
        self._checkpoints.wait()

    def keep_one_more(self) -> None:
        self._checkpoints.folder.keep += 1

    def close(self) -> None:
        self._checkpoints.close()

    def _begin(self, step: int, values: Values) -> None:
        if self._saved_step != step:
            self._checkpoints.begin(values())
            self._saved_step = step

    def _wait(self) -> None:
        try:
            self._checkpoints.wait()
        except StoreError as error:
            self._failed(error)

    def _failed(self, error: StoreError) -> None:
        if isinstance(error, LaneError):  # of the disk that training itself needs
            raise error
        self._saved_step = None
        self._tell(f"a checkpoint could not be written, and training goes on: {error}")
