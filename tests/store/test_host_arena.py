"""Host arenas: exact, aligned, zeroed, disjoint, and given back when nobody needs them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import OutOfBudget
from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.store.ledger import Ledger

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int16])


@given(st.lists(st.tuples(st.integers(1, 700), dtypes), min_size=1, max_size=10))
def test_spans_are_aligned_zeroed_and_disjoint(wanted: list[tuple[int, torch.dtype]]) -> None:
    total = sum(aligned_bytes(numel, dtype) for numel, dtype in wanted)
    ledger = Ledger("host", total)
    arena = HostArena(total, purpose="weights", ledger=ledger, pin=False)
    assert ledger.taken_bytes == arena.num_bytes == total
    spans = [arena.span(numel, dtype) for numel, dtype in wanted]
    base = spans[0].data_ptr()
    for number, (span, (numel, dtype)) in enumerate(zip(spans, wanted, strict=True), start=1):
        assert (span.numel(), span.dtype) == (numel, dtype)
        assert (span.data_ptr() - base) % 256 == 0
        assert not span.any()
        span.fill_(number)
    for number, span in enumerate(spans, start=1):
        assert bool((span == number).all())


def test_spans_outlive_the_arena() -> None:
    span = HostArena(1 << 16, purpose="weights", ledger=Ledger("host", None), pin=False).span(
        1 << 14, torch.float32
    )
    span.fill_(2.0)
    others = [
        HostArena(1 << 16, purpose="w", ledger=Ledger("host", None), pin=False) for _ in range(5)
    ]
    assert float(span.sum()) == 2.0 * (1 << 14)
    del others


def test_no_more_than_the_arena_has() -> None:
    arena = HostArena(1024, purpose="weights", ledger=Ledger("host", None), pin=False)
    arena.span(200, torch.float32)
    with pytest.raises(AssertionError, match="weights"):
        arena.span(200, torch.float32)


def test_over_the_budget_takes_nothing() -> None:
    ledger = Ledger("host", 1000)
    with pytest.raises(OutOfBudget, match="host_memory"):
        HostArena(1024, purpose="weights", ledger=ledger, pin=False)
    assert ledger.taken_bytes == 0


def test_what_the_system_refuses_to_map() -> None:
    ledger = Ledger("host", None)
    with pytest.raises(OutOfBudget, match=r"refused to map"):
        HostArena(1 << 62, purpose="weights", ledger=ledger, pin=False)
    assert ledger.taken_bytes == 0
