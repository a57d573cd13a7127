"""One AdamW step over the compact state of CPU tensors by the C++ library, on checked tensors."""

from __future__ import annotations

import ctypes

from torch import Tensor

from .adamw_host import GRAD_DTYPE
from .adamw_scalars import AdamWScalars
from .compact_format import CompactMoments
from .library import ScalarsStruct, check_status


def adamw_compact_(
    library: ctypes.CDLL,
    weight: Tensor,
    remainder: Tensor | None,
    moments: CompactMoments,
    grad: Tensor,
    *,
    scalars: AdamWScalars,
    seed: int,
    step: int,
    first_element: int,
    threads: int,
) -> None:
    moments_and_on = (
        *(tensor.data_ptr() for tensor in moments),
        grad.data_ptr(),
        GRAD_DTYPE[grad.dtype],
        weight.numel(),
        ctypes.byref(ScalarsStruct(**vars(scalars))),
        seed,  # c_uint64 takes it modulo 2^64
        step,
        first_element,
        threads,
    )
    if remainder is None:
        status = library.oc_adamw_minimal(weight.data_ptr(), *moments_and_on)
    else:
        status = library.oc_adamw_compact(weight.data_ptr(), remainder.data_ptr(), *moments_and_on)
    check_status(status)
