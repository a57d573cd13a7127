"""The norm that gradients are clipped to is that of their elements, also of many."""

from __future__ import annotations

import math

import pytest
import torch

from outcore.optim.global_norm import GlobalNorm
from outcore.optim.gradients import squared_norm


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 20_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_not_lost_in_a_large_sum(numel: int, dtype: torch.dtype) -> None:
    """One fp32 sum over the largest of these is 0.2% too small."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(dtype)
    expected = float(values.double().square().sum())
    assert float(squared_norm(values)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5000])
def test_what_is_not_finite_stays_so(bad: float, place: int) -> None:
    values = torch.zeros(5001)
    values[place] = bad
    assert not torch.isfinite(squared_norm(values))


def test_the_global_norm_is_that_of_all_gradients_together() -> None:
    norm = GlobalNorm.of({(0, "weight"): 9.0, (1, ""): 16.0}, str)
    assert norm.value == 5.0
    assert norm.is_finite
    assert norm.clip_factor(None) == norm.clip_factor(6.0) == 1.0
    assert 5.0 * norm.clip_factor(1.0) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_named(bad: float) -> None:
    norm = GlobalNorm.of({(0, "a"): bad, (1, "b"): 1.0, (2, "c"): bad}, lambda key: key[1])
    assert math.isnan(norm.value)
    assert not norm.is_finite
    assert norm.not_finite_in == "a, c"
