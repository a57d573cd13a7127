"""What an allocator takes of a budget, and the budget that holds so much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.store.allocator_slack import budget_to_fill, fillable_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("budget", "is_gpu", "fillable"),
    [
        (24 << 30, True, int((24 << 30) * 0.97)),
        (513 * MIB, True, 433 * MIB),  # pages of 20 MiB, which a share of it would not hold
        (60 * MIB, True, 50 * MIB),
        (513 * MIB, False, int(513 * MIB * 0.97)),
    ],
)
def test_small_budgets_of_a_gpu_leave_whole_pages(budget: int, is_gpu: bool, fillable: int) -> None:
    assert fillable_bytes(budget, is_gpu=is_gpu) == pytest.approx(fillable, abs=1)


@given(num_bytes=st.integers(0, 1 << 42), more=st.integers(0, 1 << 40), is_gpu=st.booleans())
def test_the_budget_for_so_many_bytes_holds_them(num_bytes: int, more: int, is_gpu: bool) -> None:
    budget = budget_to_fill(num_bytes, is_gpu=is_gpu)
    assert num_bytes <= fillable_bytes(budget, is_gpu=is_gpu) <= num_bytes + 3
    assert budget_to_fill(num_bytes + more, is_gpu=is_gpu) >= budget
