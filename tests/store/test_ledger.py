"""Ledgers against a model of them: never above the budget, nothing lost, peaks exact."""

import gc
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outcore.errors import OutOfBudget
from outcore.store.ledger import Ledger

BUDGET = 100
purposes = st.sampled_from(["weights", "state", "slots"])


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("host", BUDGET)
        self.taken: list[tuple[str, int]] = []
        self.holds: list[tuple[object, str, int]] = []
        self.peak = 0
        self.peaks: dict[str, int] = {}

    def _total(self, purpose: str | None = None) -> int:
        entries = [*self.taken, *((name, size) for _, name, size in self.holds)]
        return sum(size for name, size in entries if purpose in (None, name))

    def _noted(self, purpose: str) -> None:
        self.peak = max(self.peak, self._total())
        self.peaks[purpose] = max(self.peaks.get(purpose, 0), self._total(purpose))

    @rule(purpose=purposes, size=st.integers(0, 60))
    def take(self, purpose: str, size: int) -> None:
        if self._total() + size > BUDGET:
            with pytest.raises(OutOfBudget, match=f"host memory: {purpose} needs {size} B"):
                self.ledger.take(purpose, size, remedy="Buy more.")
        else:
            self.ledger.take(purpose, size)
            self.taken.append((purpose, size))
            self._noted(purpose)

    @rule(purpose=purposes, size=st.integers(0, 60))
    def hold(self, purpose: str, size: int) -> None:
        if self._total() + size <= BUDGET:
            self.holds.append((self.ledger.hold(purpose, size), purpose, size))
            self._noted(purpose)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.taken))
        self.taken.remove(entry)
        self.ledger.give_back(*entry)

    @precondition(lambda self: self.holds)
    @rule(twice=st.booleans(), forget=st.booleans())
    def end_hold(self, twice: bool, forget: bool) -> None:
        hold, *_ = self.holds.pop(0)
        if not forget:
            hold.give_back()  # type: ignore[attr-defined]
        if twice:
            hold.give_back()  # type: ignore[attr-defined]
        del hold
        gc.collect(0)

    @rule(purpose=purposes, size=st.integers(0, 60))
    def check(self, purpose: str, size: int) -> None:
        if self._total() + size > BUDGET:
            with pytest.raises(OutOfBudget):
                self.ledger.check(purpose, size)
        else:
            self.ledger.check(purpose, size)
            # What is checked is about to exist: it counts towards the peaks.
            self.peak = max(self.peak, self._total() + size)
            self.peaks[purpose] = max(self.peaks.get(purpose, 0), self._total(purpose) + size)

    @invariant()
    def books_are_right(self) -> None:
        assert self.ledger.taken_bytes == self._total() <= BUDGET
        assert self.ledger.peak_bytes == self.peak
        assert self.ledger.peaks() == self.peaks


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_the_refusal_has_the_numbers_and_the_remedy() -> None:
    ledger = Ledger("device", 3 * 2**20)
    ledger.take("weight slots", 2**20)
    ledger.take("gradient buffers", 2**19)
    with pytest.raises(OutOfBudget) as caught:
        ledger.take("optimizer state", 2**21, remedy='Use state="host".')
    assert str(caught.value) == (
        "device memory: optimizer state needs 2.0 MiB, which makes 3.5 MiB of a budget of 3.0 MiB "
        '(already taken: weight slots 1.0 MiB, gradient buffers 512.0 KiB). Use state="host".'
    )


def test_no_budget_refuses_nothing() -> None:
    ledger = Ledger("host", None)
    ledger.take("weights", 2**60)
    assert ledger.taken_bytes == ledger.peak_bytes == 2**60


def test_many_threads() -> None:
    ledger = Ledger("host", 4)
    refused = []

    def work() -> None:
        for _ in range(300):
            try:
                ledger.take("weights", 1)
            except OutOfBudget:
                refused.append(1)
                continue
            assert ledger.taken_bytes <= 4
            ledger.give_back("weights", 1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.taken_bytes == 0
    assert ledger.peak_bytes <= 4


def test_a_budget_that_is_short_by_a_byte_says_so() -> None:
    ledger = Ledger("disk", (3 << 20) - 1)
    with pytest.raises(OutOfBudget, match=r"3\.0 MiB of a budget of 3\.0 MiB, 1 bytes too many"):
        ledger.take("scratch state", 3 << 20)


def test_two_tiers_within_one_memory_have_no_more_than_it_has() -> None:
    memory = Ledger("machine", BUDGET)
    host, device = Ledger("host", None, within=memory), Ledger("device", 50, within=memory)
    held = host.hold("weights", 70)
    device.take("slots", 20)
    said = r"machine memory: state needs 20 B.* 110 B of .* 100 B.*Device and host have it together"
    with pytest.raises(OutOfBudget, match=said) as caught:
        host.take("state", 20, remedy="Raise host_memory.")
    assert "Raise" not in str(caught.value)  # it would not help
    with pytest.raises(OutOfBudget, match=r"device memory: state needs 31 B"):
        device.take("state", 31)
    assert (host.taken_bytes, device.taken_bytes, memory.taken_bytes) == (70, 20, 90)
    held.give_back()
    device.give_back("slots", 20)
    assert memory.taken_bytes == 0
    assert memory.peak_bytes == 90
    assert (host.peak_bytes, device.peak_bytes) == (70, 20)
