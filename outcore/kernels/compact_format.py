"""The compact state formats: 8-bit moments with scales for each block, and a short master.

"compact" has the master in 24 bits, as a bf16 weight and an int8 remainder: 5 bytes a parameter and
two bytes a block. "minimal" has the bf16 weight alone: 4 bytes and two bytes a block.

Owns the layout, in torch operations on any device, and the conversion from and to fp32. How a
format is defined to the bit is said in ``kernels/outcore_kernels.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .tensor_checks import check_tensors

CompactFormat = Literal["compact", "minimal"]

BLOCK = 128  # elements that share a scale; OC_BLOCK

INFINITY_BITS = 0x7F80_0000
NAN_BITS = 0x7FC0_0000
MAGNITUDE_BITS = 0x7FFF_FFFF
OFFSET, OFFSET_BITS = 2.0**-15, 0x3800_0000


@dataclass(frozen=True, kw_only=True)
class Code:
    """A magnitude in 7 or 8 bits: an fp32 number plus OFFSET, without its last `shift` bits."""

    shift: int
    top: int


EXP_AVG = Code(shift=20, top=127)
EXP_AVG_SQ = Code(shift=19, top=255)


def num_blocks(n: int) -> int:
    """How many scales `n` elements have."""
    return -(-n // BLOCK)


def state_bytes(n: int, format: CompactFormat) -> int:
    """Bytes of `n` parameters: weight, remainder, both moments and their scales."""
    return n * (5 if format == "compact" else 4) + 2 * num_blocks(n)


def bytes_per_parameter(format: CompactFormat) -> float:
    """The same for one parameter of a large array."""
    return state_bytes(BLOCK, format) / BLOCK


class CompactMoments(NamedTuple):
    """Moments as they are stored, all uint8; the scales have one element for each block."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_scale: Tensor


def zero_moments(n: int, device: torch.device | str = "cpu") -> CompactMoments:
    """The moments of `n` parameters before the first step."""
    lengths = (n, n, num_blocks(n), num_blocks(n))
    return CompactMoments(*(torch.zeros(k, dtype=torch.uint8, device=device) for k in lengths))


# ---------------------------------------------------------------------------------------------
# Conversion from and to fp32
# ---------------------------------------------------------------------------------------------

CHUNK = 1 << 20  # elements, a multiple of BLOCK: what bounds the temporaries


@torch.no_grad()
def encode_moments(exp_avg: Tensor, exp_avg_sq: Tensor) -> CompactMoments:
    """The codes nearest to fp32 moments, which are flat and begin with a block.

    Rounding is to the nearest here: there is one rounding, and no average that it could hold up.
    """
    check_tensors(exp_avg=(exp_avg, torch.float32), exp_avg_sq=(exp_avg_sq, torch.float32))
    exp_avg, exp_avg_sq = exp_avg.view(-1), exp_avg_sq.view(-1)
    n = exp_avg.numel()
    moments = zero_moments(n, exp_avg.device)
    halves = [torch.tensor(1 << (code.shift - 1)) for code in (EXP_AVG, EXP_AVG_SQ)]
    for begin in range(0, n, CHUNK):
        m, v = (to_blocks(t[begin : begin + CHUNK]) for t in (exp_avg, exp_avg_sq))
        write_moments_(chunk_of(moments, begin), m, v, *halves)
    return moments


@torch.no_grad()
def decode_moments(moments: CompactMoments) -> tuple[Tensor, Tensor]:
    """(exp_avg, exp_avg_sq) in fp32, as the next step will read them."""
    check_moments(moments)
    n = moments.exp_avg.numel()
    decoded = [torch.empty(n, device=moments.exp_avg.device) for _ in range(2)]
    for begin in range(0, n, CHUNK):
        for whole, part in zip(decoded, read_moments(chunk_of(moments, begin)), strict=True):
            target = whole[begin : begin + CHUNK]
            target.copy_(part.view(-1)[: target.numel()])
    return decoded[0], decoded[1]


@torch.no_grad()
def split_master24(master: Tensor) -> tuple[Tensor, Tensor]:
    """`master` (fp32) → (weight bf16, remainder int8): the nearest number of 24 bits."""
    check_tensors(master=(master, torch.float32))
    weight = torch.empty_like(master, dtype=torch.bfloat16, requires_grad=False)
    remainder = torch.empty_like(master, dtype=torch.int8, requires_grad=False)
    write_master24_(master, torch.tensor(0x80), weight, remainder)
    return weight, remainder


@torch.no_grad()
def join_master24(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 number that `weight` (bf16) and `remainder` (int8) stand for."""
    check_tensors(weight=(weight, torch.bfloat16), remainder=(remainder, torch.int8))
    high = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)


def check_moments(moments: CompactMoments) -> None:
    """Raise ValueError unless codes and scales are uint8 and fit each other."""
    check_tensors(
        exp_avg=(moments.exp_avg, torch.uint8), exp_avg_sq=(moments.exp_avg_sq, torch.uint8)
    )
    check_tensors(
        exp_avg_scale=(moments.exp_avg_scale, torch.uint8),
        exp_avg_sq_scale=(moments.exp_avg_sq_scale, torch.uint8),
    )
    n, num_scales = moments.exp_avg.numel(), moments.exp_avg_scale.numel()
    if num_scales != num_blocks(n):
        raise ValueError(
            f"exp_avg_scale has {num_scales} elements, must have {num_blocks(n)}: one for each "
            f"{BLOCK} of {n}"
        )
    if moments.exp_avg_scale.device != moments.exp_avg.device:
        raise ValueError(
            f"exp_avg_scale is on {moments.exp_avg_scale.device}, "
            f"exp_avg on {moments.exp_avg.device}"
        )


# ---------------------------------------------------------------------------------------------
# The definition, unchecked: on tensors of whole blocks, of shape (blocks, BLOCK)
# ---------------------------------------------------------------------------------------------


def chunk_of(moments: CompactMoments, begin: int) -> CompactMoments:
    """The flat CHUNK elements from `begin` on, with their scales."""
    elements = slice(begin, begin + CHUNK)
    blocks = slice(begin // BLOCK, (begin + CHUNK) // BLOCK)
    return CompactMoments(
        *(t.view(-1)[elements] for t in moments[:2]), *(t.view(-1)[blocks] for t in moments[2:])
    )


def to_blocks(flat: Tensor) -> Tensor:
    """(n,) → (blocks, BLOCK), with zeros after the end, which change no block's scale."""
    padding = -flat.numel() % BLOCK
    return F.pad(flat, (0, padding)).view(-1, BLOCK) if padding else flat.view(-1, BLOCK)


def read_moments(moments: CompactMoments) -> tuple[Tensor, Tensor]:
    """(exp_avg, exp_avg_sq) in fp32, in blocks."""
    code = to_blocks(moments.exp_avg).to(torch.int32)
    magnitude = _decode(code & 0x7F, moments.exp_avg_scale, EXP_AVG)
    m = (magnitude.view(torch.int32) | ((code & 0x80) << 24)).view(torch.float32)
    code = to_blocks(moments.exp_avg_sq).to(torch.int32)
    return m, _decode(code, moments.exp_avg_sq_scale, EXP_AVG_SQ)


def write_moments_(
    moments: CompactMoments, m: Tensor, v: Tensor, m_random: Tensor, v_random: Tensor
) -> None:
    """Overwrite `moments` with fp32 blocks, rounded by random bits as many as a code cuts off."""
    m_bits, v_bits = m.view(torch.int32), v.view(torch.int32) & MAGNITUDE_BITS
    m_magnitude = m_bits & MAGNITUDE_BITS
    m_code = _encode_(m_magnitude, moments.exp_avg_scale, m_random, EXP_AVG)
    v_code = _encode_(v_bits, moments.exp_avg_sq_scale, v_random, EXP_AVG_SQ)
    # The sign of a NaN is the hardware's choice, so a block with one has no signs.
    has_nan = m_magnitude.amax(dim=1, keepdim=True) > INFINITY_BITS
    sign = ((m_bits >> 24) & 0x80).masked_fill_(has_nan, 0)
    at_least = ((v_bits | m_code) != 0).to(torch.int32)
    n = moments.exp_avg.numel()
    moments.exp_avg.copy_((m_code | sign).view(-1)[:n])
    moments.exp_avg_sq.copy_(torch.maximum(v_code, at_least).view(-1)[:n])


def write_master24_(master: Tensor, random: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Round `master` by 8 random bits to 24 bits."""
    q = bits_for_rounding(master).add_(random).bitwise_and_(~0xFF)
    weight.view(torch.int16).copy_((q + 0x8000).bitwise_right_shift_(16))
    # Two shifts, because a cast of what does not fit an int8 is not defined on every device.
    remainder.copy_((q << 16).bitwise_right_shift_(24))


def write_weight_(master: Tensor, random: Tensor, weight: Tensor) -> None:
    """Round `master` by 16 random bits to bf16."""
    rounded = bits_for_rounding(master).add_(random)
    weight.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))


def bits_for_rounding(master: Tensor) -> Tensor:
    """With one NaN for all, which no carry can turn into a number."""
    bits = master.view(torch.int32)
    return bits.masked_fill((bits & MAGNITUDE_BITS) > INFINITY_BITS, NAN_BITS)


def _decode(magnitude: Tensor, scale: Tensor, code: Code) -> Tensor:
    bits = (magnitude << code.shift).add_(OFFSET_BITS)
    return bits.view(torch.float32).sub_(OFFSET).mul_(_power_of_two(scale.to(torch.int32)))


def _encode_(magnitude_bits: Tensor, scale: Tensor, random: Tensor, code: Code) -> Tensor:
    """Codes in int32; `scale` is overwritten."""
    largest = magnitude_bits.amax(dim=1).clamp_(max=0x7E80_0000)
    new_scale = (largest.add_(0x20_0000) >> 23).clamp_(min=32)
    scale.copy_(new_scale)
    y = magnitude_bits.view(torch.float32) * _power_of_two(254 - new_scale)
    t = y.add_(OFFSET).view(torch.int32)
    return t.sub_(OFFSET_BITS).add_(random).bitwise_right_shift_(code.shift).clamp_(max=code.top)


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    """(blocks,) → (blocks, 1), 2^(biased_exponent - 127) in fp32."""
    return (biased_exponent << 23).view(torch.float32).unsqueeze(1)
