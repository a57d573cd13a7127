"""A tier's books: what is taken, by whom, the peak, and the budget that refuses more."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from outcore.errors import OutOfBudget
from outcore.units import format_bytes

_OF_ONE_MEMORY = "Device and host have it together: free some, or train fewer parameters or tokens."


class Hold:
    """Bytes that are taken until given back, or until nobody refers to the hold any more."""

    def __init__(self, ledger: Ledger, taken: dict[str, int]) -> None:
        self._ledger = ledger
        self._taken = taken

    def give_back(self) -> None:
        taken, self._taken = self._taken, {}
        for purpose, num_bytes in taken.items():
            self._ledger.give_back(purpose, num_bytes)

    def __del__(self) -> None:
        self.give_back()


@dataclass(frozen=True, kw_only=True)
class TierReport:
    """One tier's budget, peak and what it holds."""

    tier: str
    budget_bytes: int | None
    peak_bytes: int
    purposes: dict[str, int]


class Ledger:
    """Bytes of one tier by purpose. ``take`` refuses what exceeds the budget, before allocation.

    within: books of a memory that the tier is a part of, and which has to have the bytes too.
    """

    def __init__(
        self, tier: str, budget_bytes: int | None, *, within: Ledger | None = None
    ) -> None:
        self.tier = tier
        self.budget_bytes = budget_bytes
        self.within = within
        self.peak_bytes = 0
        self._taken: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        # Re-entrant: the collector may drop a Hold, which gives back, while this thread is inside.
        # One for all books of a memory: it may be a Hold of another tier.
        self._lock: threading.RLock = threading.RLock() if within is None else within._lock

    def take(self, purpose: str, num_bytes: int, *, remedy: str = "") -> None:
        with self._lock:
            total = sum(self._taken.values()) + num_bytes
            if self.budget_bytes is not None and total > self.budget_bytes:
                raise OutOfBudget(self._refusal(purpose, num_bytes, total, remedy))
            if self.within is not None:
                self.within.take(purpose, num_bytes, remedy=_OF_ONE_MEMORY)
            self._taken[purpose] = self._taken.get(purpose, 0) + num_bytes
            self._peaks[purpose] = max(self._peaks.get(purpose, 0), self._taken[purpose])
            self.peak_bytes = max(self.peak_bytes, total)

    def give_back(self, purpose: str, num_bytes: int) -> None:
        with self._lock:
            self._taken[purpose] -= num_bytes
            assert self._taken[purpose] >= 0, f"{purpose} gave back more than it took"
            if self.within is not None:
                self.within.give_back(purpose, num_bytes)

    def hold(self, purpose: str, num_bytes: int, *, remedy: str = "") -> Hold:
        self.take(purpose, num_bytes, remedy=remedy)
        return Hold(self, {purpose: num_bytes})

    def check(self, purpose: str, num_bytes: int, *, remedy: str = "") -> None:
        """Raise as ``take`` would, without taking: for work that frees its bytes itself."""
        self.take(purpose, num_bytes, remedy=remedy)
        self.give_back(purpose, num_bytes)

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(self._taken.values())

    def taken(self) -> dict[str, int]:
        """Return the bytes that each purpose has now."""
        with self._lock:
            return dict(self._taken)

    def peaks(self) -> dict[str, int]:
        """Return the peak bytes of each purpose, largest first."""
        with self._lock:
            return dict(sorted(self._peaks.items(), key=lambda item: -item[1]))

    def _refusal(self, purpose: str, num_bytes: int, total: int, remedy: str) -> str:
        assert self.budget_bytes is not None
        held = ", ".join(
            f"{name} {format_bytes(size)}"
            for name, size in sorted(self._taken.items(), key=lambda item: -item[1])
            if size
        )
        noun = "space" if self.tier == "disk" else "memory"
        text = (
            f"{self.tier} {noun}: {purpose} needs {format_bytes(num_bytes)}, which makes "
            f"{format_bytes(total)} of a budget of {format_bytes(self.budget_bytes)}"
        )
        if format_bytes(total) == format_bytes(self.budget_bytes):  # or nobody sees a difference
            text += f", {total - self.budget_bytes} bytes too many"
        text += f" (already taken: {held})" if held else ""
        return f"{text}. {remedy}".rstrip()


def tier_report(ledger: Ledger) -> TierReport:
    """Return what the books say so far."""
    return TierReport(
        tier=ledger.tier,
        budget_bytes=ledger.budget_bytes,
        peak_bytes=ledger.peak_bytes,
        purposes=ledger.peaks(),
    )
