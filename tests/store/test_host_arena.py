"""Host arenas: exact, aligned, zeroed, disjoint, and given back when nobody needs them."""

from pathlib import Path

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


def test_memory_that_is_not_touched_is_zeroed_too() -> None:
    arena = HostArena(1 << 20, purpose="w", ledger=Ledger("host", None), pin=False, touch=False)
    assert not arena.span(1 << 20, torch.uint8).any()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_its_map_is_a_private_one_that_can_have_huge_pages() -> None:
    arena = HostArena(1 << 24, purpose="w", ledger=Ledger("host", None), pin=False)
    address = arena.span(1 << 24, torch.uint8).data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (access,) = [access for bounds, access, *_ in maps if is_inside(address, bounds)]
    assert access == "rw-p"


def is_inside(address: int, bounds: str) -> bool:
    start, end = (int(bound, 16) for bound in bounds.split("-"))
    return start <= address < end
