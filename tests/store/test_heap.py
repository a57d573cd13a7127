"""Holes that the C library keeps: given back where memory is short, left alone where it is not."""

import ctypes
import subprocess
import sys

import pytest

from outcore.store import heap
from outcore.store.heap import Heap

# Many arrays that the C library has no map of its own for; nine in ten are freed again.
HOLES = """
import numpy as np
from outcore.store.heap import Heap
from outcore.store.memory_limits import anonymous_bytes

before = anonymous_bytes()
arrays = [np.ones(100_000, dtype=np.uint8) for _ in range(3000)]
kept = arrays[::10]
del arrays
holes = anonymous_bytes() - before
Heap(None).settle()
Heap(1 << 50).settle()
left = anonymous_bytes() - before
Heap(anonymous_bytes()).settle()
print(holes, left, anonymous_bytes() - before, int(sum(array.sum() for array in kept)))
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library cannot be asked"
)
def test_holes_are_given_back_where_memory_is_short() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=120, check=True
    )
    holes, left, rest, total = map(int, done.stdout.split())
    assert holes > 200e6
    assert left > 0.9 * holes  # nobody needs them
    assert rest < 0.5 * holes
    assert total == 300 * 100_000


@pytest.mark.parametrize(
    ("limit_bytes", "resident", "trims"), [(None, 10**12, 0), (1000, 950, 0), (1000, 951, 1)]
)
def test_only_a_process_near_its_limit_pays_for_it(
    limit_bytes: int | None, resident: int, trims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(heap, "_trim", lambda: calls.append)
    monkeypatch.setattr(heap, "anonymous_bytes", lambda: resident)
    Heap(limit_bytes).settle()
    assert calls == [0] * trims


def test_a_c_library_without_it_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_trim", lambda: None)
    Heap(1).settle()
