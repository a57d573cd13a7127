"""Weights in 8 or 4 bits: what is stored, and how a matrix is packed. Pure; the same bits anywhere.

A matrix is cut into rows along its last dimension and each row into blocks, the last one filled up
with zeros. A block has one 16-bit scale, and each weight one code. A weight is *code times scale*:
both factors are so short (an integer or a level of at most 16 bits, a bf16 scale of 8) that their
product is exact in fp32, so that the only rounding is the last one, to the type that is wanted.

int8: codes -127 to 127, a scale for each 64: 8.25 bits a weight.
int4: 16 levels, a scale for each 32: 4.5 bits a weight. The scale has the sign of the block's
largest element, which is then always level 1: the other end of the levels need not reach -1, and
the levels lie closer. They are those of least squared error for normal weights under this scaling.
docs/quantized-base.md has the errors of the formats that were tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

PackedName = Literal["int8", "int4"]

_POSITIVE = (0, 3136, 6308, 9603, 13100, 16911, 21194, 26273, 32768)
_NEGATIVE = (-28716, -22831, -18061, -13918, -10173, -6666, -3299)
LEVELS = tuple(n / (1 << 15) for n in (*_NEGATIVE, *_POSITIVE))
"""Of int4, by code. Multiples of 2^-15: 16 bits, so that products with a bf16 scale are exact."""

_LARGEST = 2.0**120  # weights; beyond it a product could overflow
_SMALLEST = 2.0**-100  # scales; below it a product could be subnormal, which devices may flush
_AT_ONCE = 1 << 22  # elements that are packed together: bounds the temporaries


@dataclass(frozen=True, kw_only=True)
class PackedFormat:
    """How many bits a code has, and how many weights share a scale."""

    name: PackedName
    bits: int
    block: int

    @property
    def bits_per_weight(self) -> float:
        """Codes and scales together, for rows of whole blocks."""
        return self.bits + 16 / self.block

    def num_blocks(self, shape: torch.Size) -> int:
        return _num_rows(shape) * _blocks_in_row(shape, self)

    def code_bytes(self, shape: torch.Size) -> int:
        return self.num_blocks(shape) * self.block * self.bits // 8

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (uint8) and scales (bf16), both flat, on the weight's device.

        Raises ValueError for weights that are not finite, or so large that a product would not be.
        """
        if weight.dim() < 2:
            raise ValueError(f"only matrices are packed, not a tensor of {weight.dim()} dimensions")
        rows = weight.detach().reshape(-1, weight.shape[-1])
        check_range(rows)
        step = max(1, _AT_ONCE // max(1, rows.shape[1]))
        parts = [self._pack_rows(part) for part in rows.split(step)] if rows.numel() else []
        codes = [c for c, _ in parts] or [torch.empty(0, dtype=torch.uint8, device=weight.device)]
        scales = [s for _, s in parts] or [
            torch.empty(0, dtype=torch.bfloat16, device=weight.device)
        ]
        return torch.cat(codes), torch.cat(scales)

    def _pack_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        padding = -rows.shape[1] % self.block
        values = torch.nn.functional.pad(rows.float(), (0, padding))
        blocks = values.reshape(-1, self.block)  # (blocks, block)
        if self.name == "int8":
            scales = _scales(blocks.abs().amax(1) / 127)
            codes = (blocks / _divisors(scales)).round_().clamp_(-127, 127)
            return codes.to(torch.int8).view(torch.uint8).flatten(), scales
        high, low = blocks.amax(1), blocks.amin(1)
        scales = _scales(torch.where(high >= -low, high, low))
        levels = codebook(rows.device)
        # Of two levels that are equally near the lower one is taken.
        nearest = torch.bucketize(
            blocks / _divisors(scales), (levels[1:] + levels[:-1]) / 2, out_int32=True
        )
        codes4 = nearest.to(torch.uint8)
        half = self.block // 2  # a byte has an element of the first half and one of the second
        return (codes4[:, :half] | (codes4[:, half:] << 4)).flatten(), scales


INT8 = PackedFormat(name="int8", bits=8, block=64)
INT4 = PackedFormat(name="int4", bits=4, block=32)
FORMATS: dict[str, PackedFormat] = {"int8": INT8, "int4": INT4}


def packed_format(name: str | None) -> PackedFormat | None:
    """Return the format of that name; None for None."""
    if name is None:
        return None
    if name not in FORMATS:
        raise ValueError(f'frozen_weights must be "int8", "int4" or None, not {name!r}')
    return FORMATS[name]


def check_range(weight: Tensor) -> None:
    """Raise ValueError for weights that no code times scale can stand for."""
    if weight.numel() == 0:
        return
    low, high = (float(end) for end in torch.aminmax(weight.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("weights that are infinite or not a number cannot be packed in 8 or 4 bit")
    if max(-low, high) > _LARGEST:
        raise ValueError(
            f"weights up to {max(-low, high):.3g} cannot be packed in 8 or 4 bit: the limit is "
            f"{_LARGEST:.3g}"
        )


@lru_cache(maxsize=8)
def codebook(device: torch.device) -> Tensor:
    """Return the levels of int4 in fp32 on ``device``."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


def _scales(wanted: Tensor) -> Tensor:
    scales = wanted.to(torch.bfloat16)
    return torch.where(scales.float().abs() < _SMALLEST, torch.zeros_like(scales), scales)


def _divisors(scales: Tensor) -> Tensor:
    """A block of zeros is divided by one."""
    return torch.where(scales == 0, torch.ones_like(scales), scales).float().unsqueeze(1)


def _num_rows(shape: torch.Size) -> int:
    return math.prod(shape[:-1])


def _blocks_in_row(shape: torch.Size, format: PackedFormat) -> int:
    return -(-shape[-1] // format.block)
