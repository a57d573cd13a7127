"""One AdamW step over the compact state of CUDA tensors by a Triton kernel, on checked tensors.

Import only where Triton is installed. As in ``adamw_triton`` nothing is fused, and square root and
division are the correctly rounded ones. Integers are int32, whose sums and products wrap, with
masked right shifts: line by line what ``compact_format`` and ``compact_random`` do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adamw import LAUNCHING
from .adamw_scalars import AdamWScalars
from .compact_format import BLOCK, CompactMoments
from .compact_random import keys_of

_ROWS = 8  # blocks a program


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _shift_right(x, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x >> PLACES) & ((1 << (32 - PLACES)) - 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _power_of_two(biased_exponent):  # type: ignore[no-untyped-def]
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _random_bits(element, key0, key1):  # type: ignore[no-untyped-def]
    # Multipliers as int32: 0x9e3779b1, 0x7feb352d, 0x846ca68b.
    x = element.to(tl.int32) + (element >> 32).to(tl.int32) * -1640531535 + key0
    x = (x ^ _shift_right(x, 16)) * 2146121005
    x = (x ^ _shift_right(x, 15) ^ key1) * -2073254261
    return x ^ _shift_right(x, 16)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode(magnitude, scale, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = (magnitude << SHIFT) + 0x38000000
    return (bits.to(tl.float32, bitcast=True) - 0.000030517578125) * _power_of_two(scale)[:, None]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale_of(magnitude_bits):  # type: ignore[no-untyped-def]
    largest = tl.minimum(tl.max(magnitude_bits, axis=1), 0x7E800000)
    return tl.maximum((largest + 0x200000) >> 23, 32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode(  # type: ignore[no-untyped-def]
    magnitude_bits, scale, random, SHIFT: tl.constexpr, TOP: tl.constexpr
):
    inverse_scale = _power_of_two(254 - scale)[:, None]
    y = magnitude_bits.to(tl.float32, bitcast=True) * inverse_scale
    t = (y + 0.000030517578125).to(tl.int32, bitcast=True)
    return tl.minimum((t - 0x38000000 + random) >> SHIFT, TOP)


# Keys are another number at each step: specialised on their divisibility, they would be compiled
# for twice.
@triton.jit(do_not_specialize=["first_element", "key0", "key1"])  # type: ignore[untyped-decorator, unused-ignore]
def _adamw_compact_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    remainder_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    exp_avg_scale_ptr,
    exp_avg_sq_scale_ptr,
    grad_ptr,
    n,
    num_blocks,
    first_element,
    key0,
    key1,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    decay,
    step_size,
    inv_sqrt_bc2,
    grad_scale,
    MINIMAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: a span may have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (ROWS, BLOCK)
    has_scale = row < num_blocks
    inside = i < n

    # What lies outside reads as zero, stays zero, and changes no block's scale.
    m_scale = tl.load(exp_avg_scale_ptr + row, has_scale, other=0).to(tl.int32)
    v_scale = tl.load(exp_avg_sq_scale_ptr + row, has_scale, other=0).to(tl.int32)
    m_code = tl.load(exp_avg_ptr + i, inside, other=0).to(tl.int32)
    v_code = tl.load(exp_avg_sq_ptr + i, inside, other=0).to(tl.int32)
    m_bits = _decode(m_code & 0x7F, m_scale, 20).to(tl.int32, bitcast=True)
    m = (m_bits | ((m_code & 0x80) << 24)).to(tl.float32, bitcast=True)
    v = _decode(v_code, v_scale, 19)
    p_bits = tl.load(weight_ptr + i, inside, other=0).to(tl.int32) << 16
    if not MINIMAL:
        p_bits += tl.load(remainder_ptr + i, inside, other=0).to(tl.int32) << 8
    p = p_bits.to(tl.float32, bitcast=True)

    g = grad_scale * tl.load(grad_ptr + i, inside, other=0.0).to(tl.float32)
    m = (beta1 * m) + (one_minus_beta1 * g)
    v = (beta2 * v) + (one_minus_beta2 * (g * g))
    d = (tl.sqrt_rn(v) * inv_sqrt_bc2) + eps
    p = (p * decay) - (step_size * tl.div_rn(m, d))

    random = _random_bits(i + first_element, key0, key1)
    p_bits = p.to(tl.int32, bitcast=True)
    p_bits = tl.where((p_bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, p_bits)
    if MINIMAL:
        p_bits += random & 0xFFFF
        tl.store(weight_ptr + i, (p_bits >> 16).to(tl.int16), inside)
    else:
        p_bits = (p_bits + (random & 0xFF)) & -256
        tl.store(weight_ptr + i, ((p_bits + 0x8000) >> 16).to(tl.int16), inside)
        tl.store(remainder_ptr + i, (p_bits >> 8).to(tl.int8), inside)

    m_bits = m.to(tl.int32, bitcast=True)
    v_bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    m_magnitude = m_bits & 0x7FFFFFFF
    m_scale = _scale_of(m_magnitude)
    v_scale = _scale_of(v_bits)
    m_code = _encode(m_magnitude, m_scale, _shift_right(random, 12), 20, 127)
    v_code = _encode(v_bits, v_scale, (random >> 5) & 0x7FFFF, 19, 255)
    has_nan = tl.max(m_magnitude, axis=1) > 0x7F800000
    sign = tl.where(has_nan[:, None], 0, (m_bits >> 24) & 0x80)
    at_least = tl.where((v_bits | m_code) != 0, 1, 0)
    tl.store(exp_avg_scale_ptr + row, m_scale.to(tl.uint8), has_scale)
    tl.store(exp_avg_sq_scale_ptr + row, v_scale.to(tl.uint8), has_scale)
    tl.store(exp_avg_ptr + i, (m_code | sign).to(tl.uint8), inside)
    tl.store(exp_avg_sq_ptr + i, tl.maximum(v_code, at_least).to(tl.uint8), inside)


def adamw_compact_(
    weight: Tensor,
    remainder: Tensor | None,
    moments: CompactMoments,
    grad: Tensor,
    *,
    scalars: AdamWScalars,
    seed: int,
    step: int,
    first_element: int,
) -> None:
    num_blocks = moments.exp_avg_scale.numel()
    key0, key1 = keys_of(seed, step)
    with torch.cuda.device(weight.device), LAUNCHING:
        _adamw_compact_kernel[(triton.cdiv(num_blocks, _ROWS),)](
            weight.detach().view(torch.int16),
            weight if remainder is None else remainder,  # a pointer of some kind; unused if None
            *moments,
            grad,
            weight.numel(),
            num_blocks,
            first_element,
            key0,
            key1,
            scalars.beta1,
            scalars.one_minus_beta1,
            scalars.beta2,
            scalars.one_minus_beta2,
            scalars.eps,
            scalars.decay,
            scalars.step_size,
            scalars.inv_sqrt_bc2,
            scalars.grad_scale,
            MINIMAL=remainder is None,
            ROWS=_ROWS,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
