"""Stochastic rounding: right on average, and as good as independent from place to place."""

from __future__ import annotations

import pytest
import torch
from compact_states import CompactState, storing_scalars
from torch import Tensor

from outcore.kernels import BLOCK, AdamWScalars, decode_moments
from outcore.kernels.compact_random import (
    bits_for_exp_avg,
    bits_for_exp_avg_sq,
    keys_of,
    random_bits,
)

CPU = torch.device("cpu")
N = 1 << 16


def uniforms(step: int, first_element: int = 0, seed: int = 3) -> dict[str, Tensor]:
    """What each stored number is rounded by, as fractions in [0, 1)."""
    bits = random_bits(first_element, N, keys_of(seed, step), CPU)
    return {
        "exp_avg": bits_for_exp_avg(bits).double() / 2**20,
        "exp_avg_sq": bits_for_exp_avg_sq(bits).double() / 2**19,
        "weight": (bits & 0xFFFF).double() / 2**16,
        "remainder": (bits & 0xFF).double() / 2**8,
    }


def correlation(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x.norm() * y.norm())).item()


def test_every_bit_is_set_half_of_the_time() -> None:
    bits = torch.cat([random_bits(0, N, keys_of(0, step), CPU) for step in range(8)])
    for place in range(32):
        share = ((bits >> place) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / (8 * N) ** 0.5, place


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "weight", "remainder"])
def test_no_correlation_between_neighbours_or_steps(name: str) -> None:
    limit = 5 / N**0.5
    here = uniforms(step=1)[name]
    for lag in (1, 2, 3, 4, 8, 16, 64, 128, 1024, 4096):
        assert abs(correlation(here[:-lag], here[lag:])) < limit, f"lag {lag}"
    for step in (0, 2, 3, 17, 65, 1025, 1 << 32):
        assert abs(correlation(here, uniforms(step)[name])) < limit, f"step {step}"
    for seed in (0, 2, 4, 1 << 40):
        assert abs(correlation(here, uniforms(1, seed=seed)[name])) < limit, f"seed {seed}"
    for first in (N, 1 << 31, 1 << 32, 1 << 33, 1 << 40):
        assert abs(correlation(here, uniforms(1, first)[name])) < limit, f"element {first}"


def test_what_one_element_stores_is_rounded_independently() -> None:
    drawn = uniforms(step=1)
    for name, other in (("exp_avg", "exp_avg_sq"), ("exp_avg", "weight"), ("exp_avg_sq", "weight")):
        # The draws share bits: 1/256 is what is left of that.
        assert abs(correlation(drawn[name], drawn[other])) < 1 / 256 + 5 / N**0.5


def test_fractions_are_uniform() -> None:
    for name, fractions in uniforms(step=5).items():
        num_bins = 64
        counts = torch.histc(fractions, num_bins, 0.0, 1.0)
        expected = N / num_bins
        chi_squared = ((counts - expected) ** 2 / expected).sum().item()
        assert chi_squared < 63 + 5 * (2 * 63) ** 0.5, name


@pytest.mark.parametrize("format", ["compact", "minimal"])
def test_rounding_is_right_on_average(format: str) -> None:
    """Each number stored 4,000 times over: the mean is the number, to five standard errors."""
    num_steps, n = 4_000, 2 * BLOCK
    torch.manual_seed(0)
    grad = torch.randn(n) * 10.0 ** torch.empty(n).uniform_(-6, 0)
    start = torch.randn(n) * 0.02
    exact = {"exp_avg": grad.double(), "exp_avg_sq": grad.double() ** 2}
    sums = {name: torch.zeros(n, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq", "p")}
    squares = {name: torch.zeros(n, dtype=torch.float64) for name in sums}
    begin = CompactState.of(start, format)
    # What p is before it is rounded; the product and the difference are rounded to fp32.
    exact["p"] = (begin.master() - torch.tensor(1e-3) * grad).double()
    for step in range(num_steps):
        state = begin.to("cpu")
        state.step(grad, storing_scalars(step_size=torch.tensor(1e-3).item()), seed=9, step=step)
        m, v = decode_moments(state.moments)
        for name, stored in (("exp_avg", m), ("exp_avg_sq", v), ("p", state.master())):
            error = stored.double() - exact[name]
            sums[name] += error
            squares[name] += error**2
    for name, total in sums.items():
        x = exact[name].abs()
        scale = x.view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).flatten()
        # At least the distance of two codes that x may lie between.
        step_size = {
            "exp_avg": x / 8 + 2.0**-17 * scale,
            "exp_avg_sq": x / 16 + 2.0**-18 * scale,
            "p": x * (2.0**-15 if format == "compact" else 2.0**-7),
        }[name]
        # A code that is hit once in more than num_steps may not have been: hence the floor.
        variance = torch.maximum(squares[name] / num_steps, step_size**2 / num_steps)
        # What fp32 drops when the offset is added is the last term.
        bound = 5 * (variance / num_steps).sqrt() + 2.0**-38 * scale
        # Second moments below the smallest code are rounded up, always.
        tested = x > (2.0**-18 * scale if name == "exp_avg_sq" else 0.0)
        assert tested.sum() > n / 4, name
        assert ((total / num_steps).abs() <= bound)[tested].all(), name


@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_averages_do_not_stall(beta2: float) -> None:
    """v goes up and down with the squared gradient, though a step moves it by less than a code."""
    n = 64 * BLOCK
    state = CompactState.of(torch.zeros(n), "compact")
    step, v = 0, 0.0
    for magnitude, num_steps in ((1.0, 500), (1.3, 700), (0.8, 1_000)):
        grad = torch.full((n,), magnitude)
        for _ in range(num_steps):
            step += 1
            scalars = AdamWScalars.of(
                lr=0.0, beta1=0.9, beta2=beta2, eps=1e-8, weight_decay=0.0, step=step
            )
            state.step(grad, scalars, seed=2, step=step)
            v = beta2 * v + (1 - beta2) * magnitude**2
        stored_m, stored_v = decode_moments(state.moments)
        assert stored_v.double().mean().item() == pytest.approx(v, rel=0.01)
        assert stored_m.double().mean().item() == pytest.approx(magnitude, rel=0.01)
