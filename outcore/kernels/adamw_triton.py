"""One AdamW step over CUDA tensors by a Triton kernel. Tensors were checked by the caller.

Import only where Triton is installed. The bits are those of the C++ library because nothing is
fused (`enable_fp_fusion=False`) and square root and division are the correctly rounded ones; plain
`tl.sqrt` and `/` are approximations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adamw import LAUNCHING
from .adamw_scalars import AdamWScalars

_BLOCK = 1024  # elements a program: 4 or 8 a thread, enough loads in flight to fill the memory bus


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    remainder_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    n,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    decay,
    step_size,
    inv_sqrt_bc2,
    grad_scale,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: a span may have more than 2^31 elements.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n

    if SPLIT:
        high = tl.load(weight_ptr + i, inside, other=0).to(tl.int32)
        low = tl.load(remainder_ptr + i, inside, other=0).to(tl.int32)
        p = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weight_ptr + i, inside, other=0.0)
    m = tl.load(exp_avg_ptr + i, inside, other=0.0)
    v = tl.load(exp_avg_sq_ptr + i, inside, other=0.0)

    g = grad_scale * tl.load(grad_ptr + i, inside, other=0.0).to(tl.float32)
    m = (beta1 * m) + (one_minus_beta1 * g)
    v = (beta2 * v) + (one_minus_beta2 * (g * g))
    d = (tl.sqrt_rn(v) * inv_sqrt_bc2) + eps
    p = (p * decay) - (step_size * tl.div_rn(m, d))

    tl.store(exp_avg_ptr + i, m, inside)
    tl.store(exp_avg_sq_ptr + i, v, inside)
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        tl.store(weight_ptr + i, ((bits + 0x8000) >> 16).to(tl.int16), inside)
        tl.store(remainder_ptr + i, bits.to(tl.int16), inside)
    else:
        tl.store(weight_ptr + i, p, inside)


def adamw_(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    scalars: AdamWScalars,
) -> None:
    n = weight.numel()
    split = remainder is not None
    with torch.cuda.device(weight.device), LAUNCHING:
        _adamw_kernel[(triton.cdiv(n, _BLOCK),)](
            weight.detach().view(torch.int16) if split else weight,
            remainder if split else weight,  # a pointer of some kind; unused without a split
            exp_avg,
            exp_avg_sq,
            grad,
            n,
            scalars.beta1,
            scalars.one_minus_beta1,
            scalars.beta2,
            scalars.one_minus_beta2,
            scalars.eps,
            scalars.decay,
            scalars.step_size,
            scalars.inv_sqrt_bc2,
            scalars.grad_scale,
            SPLIT=split,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
