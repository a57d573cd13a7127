"""One AdamW step over the compact state, in place: checks the tensors and picks who computes it.

As ``adamw_`` does for fp32 moments: the C++ library, Triton, or torch operations, with one result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import compact_host, compact_torch, library
from .adamw import has_triton
from .adamw_scalars import AdamWScalars
from .compact_format import BLOCK, CompactMoments, check_moments
from .tensor_checks import check_tensors


def adamw_compact_(
    *,
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq_scale: Tensor,
    grad: Tensor,
    scalars: AdamWScalars,
    seed: int,
    step: int,
    first_element: int = 0,
    threads: int = 0,
) -> None:
    """Update all but `grad` in place.

    `weight` is bf16; with an int8 `remainder` this is the compact state, with None the minimal one.
    Moments and scales are uint8, with one scale for each BLOCK elements and for what is left; the
    gradient is bf16 or fp32. All are contiguous and on one device; they must not overlap.

    Rounding draws on `seed`, `step` and the index of each element, which `first_element` begins (a
    multiple of BLOCK): an array may be updated in several calls, and the result is that of one.
    Arrays that are updated with the same seed and step need indices of their own, or their
    rounding errors are the same. `threads` counts host threads, 0 for the OpenMP default.

    Autograd does not see the update: version counters stay as they are.
    """
    moments = CompactMoments(exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)
    if grad.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"grad is {grad.dtype}, must be torch.bfloat16 or torch.float32")
    master = {"weight": (weight, torch.bfloat16)}
    if remainder is not None:
        master["remainder"] = (remainder, torch.int8)
    check_tensors(
        **master,
        exp_avg=(exp_avg, torch.uint8),
        exp_avg_sq=(exp_avg_sq, torch.uint8),
        grad=(grad, grad.dtype),
    )
    check_moments(moments)
    if first_element < 0 or first_element % BLOCK != 0:
        raise ValueError(f"first_element={first_element}: must be a multiple of {BLOCK}")
    if threads < 0:
        raise ValueError(f"threads={threads}: must be 0 (the OpenMP default) or more")
    if weight.numel() == 0:
        return

    device = weight.device.type
    rounding = {"seed": seed, "step": step, "first_element": first_element}
    if device == "cpu" and (loaded := library.library()) is not None:
        compact_host.adamw_compact_(
            loaded, weight, remainder, moments, grad, scalars=scalars, threads=threads, **rounding
        )
    elif device == "cuda" and has_triton():
        from . import compact_triton  # compiles nothing, but importing Triton takes a second

        compact_triton.adamw_compact_(weight, remainder, moments, grad, scalars=scalars, **rounding)
    else:
        compact_torch.adamw_compact_(weight, remainder, moments, grad, scalars=scalars, **rounding)
