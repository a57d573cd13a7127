"""Adding a gradient to an fp32 sum, or starting the sum with it.

torch's own ``add_`` of bf16 into fp32 is not vectorised on CUDA and takes more than twice the time
that the bytes need; the Triton kernel has the same bits, because there is one addition to round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .adamw import has_triton


def accumulate_(total: Tensor, gradient: Tensor, *, is_first: bool) -> None:
    """``total`` (fp32) becomes ``gradient``, or ``total + gradient``; the shapes are equal."""
    if total.shape != gradient.shape or total.dtype != torch.float32:
        raise ValueError(
            f"cannot add {gradient.dtype} {tuple(gradient.shape)} to {total.dtype} "
            f"{tuple(total.shape)}"
        )
    vectorises = total.is_cuda and total.is_contiguous() and gradient.is_contiguous()
    if vectorises and has_triton() and total.numel() >= 1 << 16:
        from .accumulate_triton import accumulate_by_triton_

        accumulate_by_triton_(total, gradient, is_first=is_first)
    elif is_first:
        total.copy_(gradient)
    else:
        total.add_(gradient)
