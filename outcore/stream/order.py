"""The learned order: which block is used after which, as last seen.

A changed order only makes a prediction wrong, and a wrong prediction only costs time.
"""

from __future__ import annotations

from typing import NamedTuple


class Use(NamedTuple):
    """One use of a block: in which kind of pass, and which block."""

    phase: str
    block: int


class LearnedOrder:
    """Remembers, for each use, the use that followed it last time."""

    def __init__(self) -> None:
        self._next: dict[Use, Use] = {}
        self._last: Use | None = None

    def observe(self, use: Use) -> None:
        if self._last is not None:
            self._next[self._last] = use
        self._last = use

    def upcoming(self, limit: int) -> list[Use]:
        """Return up to ``limit`` uses that are expected next, nearest first."""
        uses: list[Use] = []
        use = self._last
        while use is not None and len(uses) < limit:
            use = self._next.get(use)
            if use is None or use in uses:
                break
            uses.append(use)
        return uses
