"""Weights in 8 and 4 bit: errors, shapes, extremes, and products that are rounded once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.kernels.packed import unpack, unpack_
from outcore.kernels.packed_format import FORMATS, INT4, INT8, LEVELS, PackedFormat, packed_format

formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def round_trip(
    weight: torch.Tensor, format: PackedFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return unpack(*format.pack(weight), format, weight.shape, dtype)


def blocks_of(weight: torch.Tensor, format: PackedFormat) -> torch.Tensor:
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % format.block))
    return padded.reshape(-1, format.block)


def test_the_bits_that_a_weight_takes() -> None:
    for format, most in ((INT8, 8.25), (INT4, 4.5)):
        codes, scales = format.pack(normal(64, 256))
        bits = 8 * (codes.nbytes + scales.nbytes) / (64 * 256)
        assert bits == format.bits_per_weight <= most


def test_int4_levels_are_short_enough_for_exact_products() -> None:
    assert list(LEVELS) == sorted(LEVELS)
    assert len(set(LEVELS)) == 16
    assert LEVELS[7] == 0
    assert LEVELS[15] == 1
    assert all((level * (1 << 15)).is_integer() for level in LEVELS)


@pytest.mark.parametrize(("format", "bound"), [(INT8, 0.0063), (INT4, 0.0815)], ids=FORMATS)
def test_the_error_on_normal_weights(format: PackedFormat, bound: float) -> None:
    weight = normal(256, 1024)
    error = (round_trip(weight, format) - weight).norm() / weight.norm()
    assert float(error) < bound


@formats
@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    columns=st.integers(1, 200),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 1 << 20),
)
def test_no_weight_is_further_off_than_its_blocks_scale_allows(
    format: PackedFormat, shape: list[int], columns: int, exponent: int, seed: int
) -> None:
    weight = normal(*shape, columns, seed=seed) * 2.0**exponent
    found = round_trip(weight, format)
    assert found.shape == weight.shape
    blocks = blocks_of(weight, format)
    largest = blocks.abs().amax(1, keepdim=True)
    # Half a step of int8; of int4 half the widest gap, or the end that the levels do not reach.
    share = 0.505 / 127 if format is INT8 else max(1 + LEVELS[0], 0.104) + 0.005
    assert bool(((blocks_of(found, format) - blocks).abs() <= share * largest + 1e-37).all())


@formats
@dtypes
def test_the_product_is_rounded_once(format: PackedFormat, dtype: torch.dtype) -> None:
    """In fp64 the product of code and scale has no error at all."""
    weight = normal(7, 5 * format.block)
    codes, scales = format.pack(weight)
    if format is INT8:
        values = codes.view(torch.int8).double().view(-1, format.block)
    else:
        levels = torch.tensor(LEVELS, dtype=torch.float64)
        pairs = codes.view(-1, format.block // 2).long()
        values = torch.cat([levels[pairs & 15], levels[pairs >> 4]], dim=1)
    exact = (values * scales.double()[:, None]).view(weight.shape)
    assert torch.equal(unpack(codes, scales, format, weight.shape, dtype), exact.to(dtype))


@formats
def test_packing_again_changes_nothing(format: PackedFormat) -> None:
    once = round_trip(normal(64, 300), format)
    assert torch.equal(round_trip(once, format), once)


def test_int4_stays_what_it_is_through_bf16() -> None:
    once = round_trip(normal(64, 300), INT4, torch.bfloat16)
    assert torch.equal(round_trip(once, INT4, torch.bfloat16), once)


@formats
def test_rows_are_independent_of_each_other(format: PackedFormat) -> None:
    """As large matrices are packed a few rows at a time, and experts lie one behind the other."""
    weight = normal(6, 4, 70)
    apart = torch.stack([round_trip(matrix, format) for matrix in weight])
    assert torch.equal(round_trip(weight, format), apart)
    assert torch.equal(round_trip(weight[0], format)[2:], round_trip(weight[0, 2:], format))


@formats
@dtypes
def test_zeros_signs_and_extremes(format: PackedFormat, dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, 100)
    assert torch.equal(round_trip(zeros, format, dtype), zeros.to(dtype))
    for value in (2.0**-126, -1e-37, 1e-30, 2.0**120, -(2.0**120)):
        weight = torch.zeros(2, 96)
        weight[0, 5] = weight[1, 90] = value
        found = round_trip(weight, format, dtype)
        assert bool(found.isfinite().all())
        assert torch.equal(found == 0, weight == 0) or abs(value) < 2.0**-90
        assert float(found[0, 5]) == pytest.approx(value, rel=0.01, abs=2.0**-90)
    both_ends = torch.zeros(1, 64)
    both_ends[0, 3], both_ends[0, 9] = 1.0, -1.0
    assert float(round_trip(both_ends, format)[0, 3]) == pytest.approx(1.0, rel=1e-3)
    assert -1.0 <= float(round_trip(both_ends, format)[0, 9]) < -0.85


@formats
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e37])
def test_what_no_product_can_stand_for_is_refused(format: PackedFormat, value: float) -> None:
    weight = normal(4, 64)
    weight[2, 17] = value
    with pytest.raises(ValueError, match="cannot be packed"):
        format.pack(weight)


@formats
def test_wrong_tensors_are_refused(format: PackedFormat) -> None:
    codes, scales = format.pack(normal(4, 64))
    out = torch.empty(4, 64)
    with pytest.raises(ValueError, match="contiguous"):
        unpack_(torch.empty(64, 4).t(), codes, scales, format)
    with pytest.raises(ValueError, match="bytes of codes"):
        unpack_(out, codes[:-1], scales, format)
    with pytest.raises(ValueError, match="scales bf16"):
        unpack_(out, codes, scales.float(), format)
    with pytest.raises(ValueError, match="fp32 or bf16"):
        unpack_(out.half(), codes, scales, format)
    with pytest.raises(ValueError, match="matrices"):
        format.pack(normal(64))
    with pytest.raises(ValueError, match="int3"):
        packed_format("int3")
