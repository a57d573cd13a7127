"""Splitting the fp32 master loses nothing, and its weight is the nearest bf16 number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outcore.kernels import join_master, split_master, split_master_
from outcore.kernels.master import join_by_torch, split_by_torch_

bit_patterns = st.integers(0, 2**32 - 1)


def floats_of(*patterns: int) -> Tensor:
    signed = [p - 2**32 if p >= 2**31 else p for p in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def split_by_definition(pattern: int) -> tuple[int, int]:
    weight = ((pattern + 0x8000) % 2**32) >> 16
    remainder = (pattern - (weight << 16)) % 2**32
    remainder = remainder - 2**32 if remainder >= 2**31 else remainder
    assert -(2**15) <= remainder < 2**15
    return weight, remainder


def patterns_of(tensor: Tensor) -> list[int]:
    integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return [p % 2 ** (8 * tensor.element_size()) for p in tensor.view(integer).tolist()]


@given(st.lists(bit_patterns, min_size=1, max_size=70))
def test_split_follows_its_definition_and_join_undoes_it(patterns: list[int]) -> None:
    master = floats_of(*patterns)
    weight, remainder = split_master(master)
    expected = [split_by_definition(pattern) for pattern in patterns]
    assert patterns_of(weight) == [w for w, _ in expected]
    assert remainder.tolist() == [r for _, r in expected]
    assert patterns_of(join_master(weight, remainder)) == patterns

    split_by_torch_(master, weight.zero_(), remainder.zero_())
    assert patterns_of(weight) == [w for w, _ in expected]
    assert remainder.tolist() == [r for _, r in expected]
    assert patterns_of(join_by_torch(weight, remainder)) == patterns


@given(bit_patterns.filter(lambda p: not math.isnan(floats_of(p).item())))
def test_the_weight_is_a_nearest_bf16_number(pattern: int) -> None:
    master = floats_of(pattern)
    weight, _ = split_master(master)
    cast = master.bfloat16()
    is_tie = pattern & 0xFFFF == 0x8000
    if is_tie:  # to even by the cast, away from zero here
        assert weight.float().abs() >= master.abs()
    else:
        assert patterns_of(weight) == patterns_of(cast)


@pytest.mark.parametrize(
    ("pattern", "weight", "remainder"),
    [
        (0x3F80_8000, 0x3F81, -0x8000),  # a tie goes up, where a cast would stay at 0x3F80
        (0x3F81_8000, 0x3F82, -0x8000),
        (0xBF80_8000, 0xBF81, -0x8000),  # and away from zero when negative
        (0x3F80_7FFF, 0x3F80, 0x7FFF),
        (0x7F80_0000, 0x7F80, 0),  # infinity
        (0xFF80_0000, 0xFF80, 0),
        (0x7F7F_FFFF, 0x7F80, -1),  # the largest number rounds to infinity, and comes back
        (0x0000_0001, 0x0000, 1),  # subnormals
        (0x8000_8000, 0x8001, -0x8000),
        (0x8000_0000, 0x8000, 0),  # minus zero
    ],
)
def test_ties_and_edges(isa: str, pattern: int, weight: int, remainder: int) -> None:
    num_copies = 67  # past every vector width, with a tail
    split = split_master(floats_of(pattern).repeat(num_copies))
    assert patterns_of(split[0]) == [weight] * num_copies, isa
    assert split[1].tolist() == [remainder] * num_copies, isa
    assert patterns_of(join_master(*split)) == [pattern] * num_copies, isa


def test_all_high_halves(isa: str) -> None:
    """Every sign, exponent and top of a mantissa, with remainders from each side of a tie."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = (high + low).view(torch.float32)
        weight, remainder = split_master(master)
        other = torch.empty_like(weight), torch.empty_like(remainder)
        split_by_torch_(master, *other)
        assert torch.equal(weight.view(torch.int16), other[0].view(torch.int16)), (isa, low)
        assert torch.equal(remainder, other[1]), (isa, low)
        joined = join_master(weight, remainder)
        assert torch.equal(joined.view(torch.int32), master.view(torch.int32)), (isa, low)


def test_shapes_are_kept_and_autograd_stays_out() -> None:
    master = torch.nn.Parameter(torch.randn(3, 5))
    weight, remainder = split_master(master)
    assert weight.shape == remainder.shape == join_master(weight, remainder).shape == (3, 5)
    assert not weight.requires_grad
    assert torch.equal(join_master(weight, remainder), master)


def test_wrong_tensors_are_refused() -> None:
    master, weight = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    remainder = torch.zeros(4, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"master is torch\.float64"):
        split_master(master.double())
    with pytest.raises(ValueError, match="remainder has 3 elements, master has 4"):
        split_master_(master, weight, remainder[:3])
    with pytest.raises(ValueError, match="weight is not contiguous"):
        join_master(torch.zeros(4, 2, dtype=torch.bfloat16)[:, 0], remainder)
