"""The compact formats: their size, their accuracy, and what they never lose."""

from __future__ import annotations

import math

import pytest
import torch
from adamw_states import hostile_grad, scalars_of
from compact_states import CompactState, storing_scalars
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outcore.kernels import (
    BLOCK,
    CompactMoments,
    bytes_per_parameter,
    decode_moments,
    encode_moments,
    join_master24,
    num_blocks,
    split_master24,
    state_bytes,
)

# Half a step, relative to a magnitude that is large against the offset: 8 and 16 steps a binade.
EXP_AVG_ERROR, EXP_AVG_SQ_ERROR = 1 / 16, 1 / 32
SMALLEST_STEP = 2.0**-18  # of the power of two that a block is scaled by


def stored_bytes(state: CompactState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors().values())


@pytest.mark.parametrize(("format", "limit"), [("compact", 5.2), ("minimal", 4.2)])
def test_bytes_a_parameter(format: str, limit: float) -> None:
    assert bytes_per_parameter(format) <= limit
    for n in (1, BLOCK, 1_000_003):
        assert stored_bytes(CompactState.make(n, format)) == state_bytes(n, format)
    assert [num_blocks(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]


def test_moments_survive_within_half_a_code() -> None:
    torch.manual_seed(0)
    m = torch.randn(1_000) * 10.0 ** torch.empty(1_000).uniform_(-3, 0)
    v = torch.rand(1_000) ** 4
    m[5], v[5] = 0.0, 0.0
    decoded_m, decoded_v = decode_moments(encode_moments(m, v))
    for decoded, exact, error in (
        (decoded_m, m, EXP_AVG_ERROR),
        (decoded_v, v, EXP_AVG_SQ_ERROR),
    ):
        # Near zero steps have one size: that of the block's offset.
        bound = error * exact.abs() + 2.0**-19 * 2 * exact.abs().max()
        assert ((decoded - exact).abs() <= bound).all()
    assert decoded_m[5] == 0
    assert decoded_v[5] == 0


def blocks_of_all_codes() -> CompactMoments:
    """One block with each code of exp_avg and half those of exp_avg_sq, one with the other half.

    Their largest magnitudes are such that a new scale would be the old one.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    exp_avg = torch.cat([codes[:126], codes[:2], codes[128:254], codes[:2]])
    exp_avg_sq = codes.clone()
    exp_avg_sq[:2] = 1
    exp_avg_sq[126:128] = 248  # 1.5: sets the scale of the first block
    exp_avg_sq[252:] = 251
    exp_avg[1], exp_avg_sq[0], exp_avg[0] = 1, 0, 0
    scales = torch.tensor([32, 200], dtype=torch.uint8)
    return CompactMoments(exp_avg, exp_avg_sq, scales, scales.flip(0).clone())


def test_what_was_decoded_is_encoded_to_the_same_codes() -> None:
    moments = blocks_of_all_codes()
    again = encode_moments(*decode_moments(moments))
    for name, tensor in moments._asdict().items():
        assert torch.equal(getattr(again, name), tensor), name


def test_codes_are_ordered_and_decoding_is_exact() -> None:
    codes = torch.arange(128, dtype=torch.uint8)
    scale = torch.tensor([127], dtype=torch.uint8)  # 1.0
    m, v = decode_moments(CompactMoments(codes, codes, scale, scale))
    assert m[0] == v[0] == 0
    assert (m.diff() > 0).all()
    assert (v.diff() > 0).all()
    assert m[1] == SMALLEST_STEP
    assert m[127] == 1.875 - 2.0**-15
    minus = decode_moments(CompactMoments(codes + 128, codes, scale, scale))[0]
    assert torch.equal(minus, -m)


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e-12, 1.0, 1e30, 3e38])
def test_every_magnitude_is_stored(magnitude: float) -> None:
    v = torch.full((3,), magnitude) * torch.tensor([1.0, 0.3, 0.0])
    decoded_m, decoded_v = decode_moments(encode_moments(-v, v))
    assert (decoded_v[:2] > 0).all()
    assert decoded_v[2] == decoded_m[2] == 0
    if 1e-30 < magnitude < 1e38:
        assert decoded_v[0].item() == pytest.approx(magnitude, rel=EXP_AVG_SQ_ERROR)
        assert decoded_m[0].item() == pytest.approx(-magnitude, rel=EXP_AVG_ERROR)
    assert decoded_m.isfinite().all()
    assert decoded_v.isfinite().all()


@pytest.mark.parametrize("format", ["compact", "minimal"])
def test_no_first_moment_without_a_second(isa: str, format: str) -> None:
    """Else an update would be m / eps, whatever v was before it was rounded away."""
    n = 10_003
    state = CompactState.make(n, format)
    for step in range(1, 60):
        state.step(hostile_grad(n, step, torch.float32), scalars_of(step), seed=1, step=step)
        has_m = (state.moments.exp_avg & 0x7F) != 0
        assert has_m.any()
        assert (state.moments.exp_avg_sq[has_m] != 0).all(), isa


def test_an_outlier_does_not_make_its_neighbours_explode(isa: str) -> None:
    """One huge gradient in a block: the others' moments lose accuracy, and never their bound."""
    n = BLOCK
    state = CompactState.of(torch.zeros(n), "compact")
    torch.manual_seed(0)
    for step in range(1, 200):
        grad = torch.randn(n) * 1e-3
        if step % 50 == 10:
            grad[17] = 1e4
        before = state.master()
        state.step(grad, scalars_of(step, grad_scale=1.0), seed=1, step=step)
        # |m| / sqrt(v) of true moments is at most 0.1 / sqrt(0.05) * 1 / sqrt(1 - 0.81 / 0.95).
        assert (state.master() - before).abs().max() < 3e-4 * 5, (isa, step)


def pattern_of(value: Tensor) -> int:
    return int(value.view(torch.int32).item()) % 2**32


@given(st.integers(0, 2**32 - 1).filter(lambda p: p & 0x7FFF_FFFF < 0x7F80_0000))
def test_the_master_is_rounded_to_the_nearest_24_bits(pattern: int) -> None:
    signed = pattern - 2**32 if pattern >= 2**31 else pattern
    master = torch.tensor([signed], dtype=torch.int32).view(torch.float32)
    joined = join_master24(*split_master24(master))
    assert pattern_of(joined) == (pattern + 0x80) % 2**32 & ~0xFF
    assert pattern_of(join_master24(*split_master24(joined))) == pattern_of(joined)


def test_the_weight_is_a_nearest_bf16_number_of_the_master() -> None:
    torch.manual_seed(0)
    master = join_master24(*split_master24(torch.randn(100_000)))
    weight, _ = split_master24(master)
    # Compared as errors: ties, which 24 bits make likely, go away from zero and not to even.
    error = (weight.double() - master.double()).abs()
    assert torch.equal(error, (master.bfloat16().double() - master.double()).abs())


def test_a_step_stores_exactly_what_has_a_code(isa: str) -> None:
    """Stochastic rounding leaves a number alone that needs none."""
    moments = blocks_of_all_codes()
    m, _ = decode_moments(moments)
    m = m[:BLOCK] * 2.0**80  # one block, and squares that are normal numbers
    state = CompactState.of(m, "compact")
    for step in range(1, 5):
        state.step(m, storing_scalars(), seed=3, step=step)
        assert torch.equal(decode_moments(state.moments)[0], m), isa
        assert torch.equal(state.master(), m), isa


def test_conversion_checks_its_tensors() -> None:
    with pytest.raises(ValueError, match=r"exp_avg_sq is torch\.float64"):
        encode_moments(torch.zeros(3), torch.zeros(3, dtype=torch.float64))
    moments = encode_moments(torch.zeros(300), torch.zeros(300))
    with pytest.raises(ValueError, match="exp_avg_scale has 2 elements, must have 3"):
        decode_moments(
            moments._replace(
                exp_avg_scale=moments.exp_avg_scale[:2],
                exp_avg_sq_scale=moments.exp_avg_sq_scale[:2],
            )
        )
    assert math.prod(decode_moments(encode_moments(torch.zeros(0), torch.zeros(0)))[0].shape) == 0
