"""The Triton kernel behind ``accumulate_``. Import only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _accumulate_kernel(  # type: ignore[no-untyped-def]
    total_ptr, gradient_ptr, n, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(gradient_ptr + i, inside, other=0.0).to(tl.float32)
    if not IS_FIRST:
        value += tl.load(total_ptr + i, inside, other=0.0)
    tl.store(total_ptr + i, value, inside)


def accumulate_by_triton_(total: Tensor, gradient: Tensor, *, is_first: bool) -> None:
    n = total.numel()
    with torch.cuda.device(total.device):
        _accumulate_kernel[(triton.cdiv(n, _BLOCK),)](
            total, gradient, n, IS_FIRST=is_first, BLOCK=_BLOCK, num_warps=8
        )
