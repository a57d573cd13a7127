"""One AdamW step in plain torch operations, on any device. Tensors were checked by the caller.

The same bits as the C++ and Triton kernels, because every operation here rounds once: no addcmul,
no lerp, no alpha=. Works through the tensors in chunks, so that temporaries stay at a few MiB
whatever the size of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .adamw_scalars import AdamWScalars
from .master import join_by_torch, split_by_torch_

CHUNK = 1 << 20  # elements


@torch.no_grad()
def adamw_(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    scalars: AdamWScalars,
) -> None:
    weight, exp_avg, exp_avg_sq, grad = (t.view(-1) for t in (weight, exp_avg, exp_avg_sq, grad))
    remainder = None if remainder is None else remainder.view(-1)
    for begin in range(0, weight.numel(), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        moments_and_grad = (exp_avg[chunk], exp_avg_sq[chunk], grad[chunk])
        if remainder is None:
            update_(weight[chunk], *moments_and_grad, scalars)
        else:
            master = join_by_torch(weight[chunk], remainder[chunk])
            update_(master, *moments_and_grad, scalars)
            split_by_torch_(master, weight[chunk], remainder[chunk])


def update_(p: Tensor, m: Tensor, v: Tensor, grad: Tensor, s: AdamWScalars) -> None:
    g = grad.float() * s.grad_scale
    m.mul_(s.beta1).add_(g * s.one_minus_beta1)
    v.mul_(s.beta2).add_((g * g).mul_(s.one_minus_beta2))
    d = _sqrt(v).mul_(s.inv_sqrt_bc2).add_(s.eps)
    p.mul_(s.decay).sub_((m / d).mul_(s.step_size))


def _sqrt(v: Tensor) -> Tensor:
    """The correctly rounded square root, by way of fp64.

    On the CPU, torch's fp32 root comes from a vector math library that may be off by one bit. The
    root of an fp32 number keeps at least 2^-50 (relative to 1) from any point where its rounding to
    fp32 turns, so an fp64 root that is right to 2^-52 always rounds to the right side.
    """
    return v.double().sqrt_().float()
