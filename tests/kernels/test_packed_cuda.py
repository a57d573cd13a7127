"""On a CUDA device: packing and expanding give the host's bits, by Triton and by torch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from outcore.kernels.packed import _unpack_by_torch_, unpack
from outcore.kernels.packed_format import FORMATS, PackedFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPES = [(64, 256), (5, 1), (3, 31), (7, 65), (4, 33, 100), (300, 1000)]


def weights(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    weight = torch.randn(shape, generator=generator)
    if kind == "spread":  # from below the smallest scale to the largest weight
        weight = weight * torch.exp2(torch.randint(-120, 116, shape, generator=generator).float())
    elif kind == "zeros":
        weight[weight < 0.5] = 0
    return weight


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "spread", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_has_the_bits_of_the_host(
    format: PackedFormat, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    weight = weights(shape, kind)
    codes, scales = format.pack(weight)
    codes_there, scales_there = format.pack(weight.cuda())
    assert torch.equal(codes_there.cpu(), codes)
    assert torch.equal(scales_there.cpu().view(torch.int16), scales.view(torch.int16))
    here = unpack(codes, scales, format, weight.shape, dtype)
    by_torch = torch.empty(shape, dtype=dtype, device="cuda")
    _unpack_by_torch_(by_torch, codes_there, scales_there, format)
    as_bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(by_torch.cpu().view(as_bits), here.view(as_bits))
    if importlib.util.find_spec("triton") is not None:
        there = unpack(codes_there, scales_there, format, weight.shape, dtype)
        assert torch.equal(there.cpu().view(as_bits), here.view(as_bits))
