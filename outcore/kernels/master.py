"""The fp32 master as a bf16 weight and a 16-bit remainder, exactly.

Splitting rounds to nearest with ties away from zero. Ties to even, which a cast would do, leave
differences of plus and minus 2^15, one value too many for 16 bits. Every 32-bit pattern survives
split and join, also infinities and NaNs; the weight alone is the nearest bf16 number for all
patterns but NaNs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import check_status, library
from .tensor_checks import check_tensors


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """`master` (fp32) → (weight bf16, remainder int16), of the same shape."""
    weight = torch.empty_like(master, dtype=torch.bfloat16, requires_grad=False)
    remainder = torch.empty_like(master, dtype=torch.int16, requires_grad=False)
    split_master_(master, weight, remainder)
    return weight, remainder


def split_master_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split `master` (fp32) into `weight` (bf16) and `remainder` (int16), which are overwritten."""
    check_tensors(
        master=(master, torch.float32),
        weight=(weight, torch.bfloat16),
        remainder=(remainder, torch.int16),
    )
    if master.device.type == "cpu" and (loaded := library()) is not None:
        check_status(
            loaded.oc_split_master(
                master.data_ptr(), weight.data_ptr(), remainder.data_ptr(), master.numel(), 0
            )
        )
    else:
        split_by_torch_(master.view(-1), weight.view(-1), remainder.view(-1))


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master that `weight` (bf16) and `remainder` (int16) were split from."""
    check_tensors(weight=(weight, torch.bfloat16), remainder=(remainder, torch.int16))
    if weight.device.type == "cpu" and (loaded := library()) is not None:
        master = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
        check_status(
            loaded.oc_join_master(
                weight.data_ptr(), remainder.data_ptr(), master.data_ptr(), weight.numel(), 0
            )
        )
        return master
    return join_by_torch(weight, remainder)


@torch.no_grad()
def split_by_torch_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """split_master_ in torch operations, on any device, unchecked."""
    bits = master.view(torch.int32)
    # int32 sums wrap, and a right shift keeps the sign: both as the 16-bit halves want it.
    weight.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))
    # What the weight takes away is a multiple of 2^16, so the remainder is the master's low half.
    remainder.copy_((bits << 16).bitwise_right_shift_(16))


@torch.no_grad()
def join_by_torch(weight: Tensor, remainder: Tensor) -> Tensor:
    """join_master in torch operations, on any device, unchecked."""
    high = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder).view(torch.float32)
