"""What every kernel asks of its tensors, said to the caller before a raw pointer is taken."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensors(**tensors: tuple[Tensor, torch.dtype]) -> None:
    """Raise ValueError unless all are contiguous, of the given dtypes, one device and one length.

    The first tensor sets the device and the length.
    """
    first_name, (first, _) = next(iter(tensors.items()))
    for name, (tensor, dtype) in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, must be {dtype}")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, {first_name} on {first.device}")
        if tensor.numel() != first.numel():
            raise ValueError(
                f"{name} has {tensor.numel()} elements, {first_name} has {first.numel()}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous (strides {tuple(tensor.stride())})")
