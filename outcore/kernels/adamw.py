"""One AdamW step in place: checks the tensors and picks who computes it.

The C++ library for CPU tensors, Triton for CUDA tensors, torch operations for the rest and wherever
either is missing. The choice changes the speed and not the bits.
"""

from __future__ import annotations

import functools
import importlib.util
import threading

import torch
from torch import Tensor

from . import adamw_host, adamw_torch, library
from .adamw_scalars import AdamWScalars
from .tensor_checks import check_tensors

# Lanes launch from threads of their own. While one thread loads a kernel, Triton lets the next one
# launch it with nothing loaded (triton-lang/triton#11518).
LAUNCHING = threading.Lock()


def adamw_(
    *,
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: AdamWScalars,
    threads: int = 0,
) -> None:
    """Update `weight`, `remainder`, `exp_avg` and `exp_avg_sq` in place with `grad`.

    `weight` is bf16 with an int16 `remainder` (together the fp32 master), or fp32 with None. The
    moments are fp32, the gradient bf16 or fp32. All are contiguous, of one length and on one
    device; they must not overlap. `threads` counts host threads, 0 for the OpenMP default.

    Autograd does not see the update: version counters stay as they are.
    """
    if remainder is None:
        check_tensors(weight=(weight, torch.float32), **_moments(exp_avg, exp_avg_sq, grad))
    else:
        check_tensors(
            weight=(weight, torch.bfloat16),
            remainder=(remainder, torch.int16),
            **_moments(exp_avg, exp_avg_sq, grad),
        )
    if threads < 0:
        raise ValueError(f"threads={threads}: must be 0 (the OpenMP default) or more")
    if weight.numel() == 0:
        return

    device = weight.device.type
    if device == "cpu" and (loaded := library.library()) is not None:
        adamw_host.adamw_(
            loaded, weight, remainder, exp_avg, exp_avg_sq, grad, scalars=scalars, threads=threads
        )
    elif device == "cuda" and has_triton():
        from . import adamw_triton  # compiles nothing, but importing Triton takes a second

        adamw_triton.adamw_(weight, remainder, exp_avg, exp_avg_sq, grad, scalars=scalars)
    else:
        adamw_torch.adamw_(weight, remainder, exp_avg, exp_avg_sq, grad, scalars=scalars)


def _moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor
) -> dict[str, tuple[Tensor, torch.dtype]]:
    if grad.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"grad is {grad.dtype}, must be torch.bfloat16 or torch.float32")
    return {
        "exp_avg": (exp_avg, torch.float32),
        "exp_avg_sq": (exp_avg_sq, torch.float32),
        "grad": (grad, grad.dtype),
    }


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
