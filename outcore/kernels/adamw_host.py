"""One AdamW step over CPU tensors by the C++ library. Tensors were checked by the caller."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .adamw_scalars import AdamWScalars
from .library import ScalarsStruct, check_status

GRAD_DTYPE = {torch.bfloat16: 0, torch.float32: 1}  # enum oc_dtype


def adamw_(
    library: ctypes.CDLL,
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    scalars: AdamWScalars,
    threads: int,
) -> None:
    moments_and_grad = (
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        GRAD_DTYPE[grad.dtype],
        weight.numel(),
        ctypes.byref(ScalarsStruct(**vars(scalars))),
        threads,
    )
    if remainder is None:
        status = library.oc_adamw_fp32(weight.data_ptr(), *moments_and_grad)
    else:
        status = library.oc_adamw_split(weight.data_ptr(), remainder.data_ptr(), *moments_and_grad)
    check_status(status)
