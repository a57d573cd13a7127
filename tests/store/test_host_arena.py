"""Host arenas: exact, aligned, zeroed, disjoint, and given back when nobody needs them."""

import ctypes
import mmap
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import OutOfBudget, StoreError
from outcore.store.host_arena import HostArena, aligned_bytes, made_ahead
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


def untouched(num_bytes: int) -> HostArena:
    return HostArena(
        num_bytes, purpose="weights", ledger=Ledger("host", None), pin=False, touch=False
    )


def resident_bytes(span: torch.Tensor) -> int:
    """What of a page-aligned span has memory, by the system's own account."""
    pages = -(-span.numel() // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    address, size = ctypes.c_void_p(span.data_ptr()), ctypes.c_size_t(span.numel())
    assert ctypes.CDLL(None).mincore(address, size, found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def test_pages_are_made_ahead_of_filling_and_keep_what_is_filled() -> None:
    if not untouched(mmap.PAGESIZE).populate(0, mmap.PAGESIZE):
        pytest.skip("this kernel makes no pages ahead")
    arenas = [untouched(3 << 20) for _ in range(4)]
    spans = [arena.span(3 << 20, torch.uint8) for arena in arenas]
    assert resident_bytes(spans[3]) == 0
    with made_ahead(arenas, pin=False):
        for number, span in enumerate(spans[:3], start=1):
            span.fill_(number)
    assert resident_bytes(spans[3]) == 3 << 20
    for number, span in enumerate(spans[:3], start=1):
        assert bool((span == number).all())
    assert not spans[3].any()


def test_all_are_pinned_when_the_last_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[HostArena] = []
    monkeypatch.setattr(HostArena, "pin", lambda arena: pinned.append(arena))
    arenas = [untouched(1 << 20) for _ in range(20)]
    with made_ahead(arenas, pin=True):
        pass
    assert pinned == arenas


def test_where_the_system_makes_no_pages_filling_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[HostArena] = []
    monkeypatch.setattr(HostArena, "pin", lambda arena: pinned.append(arena))
    monkeypatch.setattr("outcore.store.host_arena._MADV_POPULATE_WRITE", 9999)
    arena = untouched(1 << 20)
    span = arena.span(1 << 20, torch.uint8)
    with made_ahead([arena], pin=True):
        span.fill_(7)
    assert pinned == [arena]
    assert bool((span == 7).all())


def test_a_failure_to_fill_ends_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    filling_failed = threading.Event()
    made: list[HostArena] = []

    def populate(arena: HostArena, start: int, num_bytes: int) -> bool:
        made.append(arena)
        assert filling_failed.wait(60)
        return True

    monkeypatch.setattr(HostArena, "populate", populate)
    arenas = [untouched(1 << 20) for _ in range(3)]

    def fill() -> None:
        with made_ahead(arenas, pin=False):
            threading.Timer(0.2, filling_failed.set).start()
            raise StoreError("the disk is gone", path=Path("weights"))

    with pytest.raises(StoreError, match="gone"):
        fill()
    assert made == arenas[:1]
    assert not any("outcore-pages" in thread.name for thread in threading.enumerate())


def test_a_failure_to_pin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(arena: HostArena) -> None:
        raise RuntimeError("no CUDA")

    monkeypatch.setattr(HostArena, "pin", pin)
    with pytest.raises(RuntimeError, match="no CUDA"), made_ahead([untouched(64)], pin=True):
        pass


def test_ctrl_c_while_the_last_are_made_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_filled, waiting = threading.Event(), threading.main_thread().ident
    made: list[HostArena] = []

    def populate(arena: HostArena, start: int, num_bytes: int) -> bool:
        made.append(arena)
        assert is_filled.wait(60)
        if len(made) == 1:
            time.sleep(0.2)  # until the filling thread waits
            assert waiting is not None
            signal.pthread_kill(waiting, signal.SIGINT)
        time.sleep(0.1)
        return True

    monkeypatch.setattr(HostArena, "populate", populate)
    arenas = [untouched(1 << 20) for _ in range(50)]
    with pytest.raises(KeyboardInterrupt), made_ahead(arenas, pin=False):
        is_filled.set()
    assert len(made) < 20


def test_memory_is_pinned_for_the_device_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread begins with the first GPU, and would take memory there."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"device {device}"))
    monkeypatch.setattr(HostArena, "pin", lambda arena: done.append("pin"))
    with made_ahead([untouched(64)], pin=True):
        pass
    assert done == ["device 1", "pin"]
