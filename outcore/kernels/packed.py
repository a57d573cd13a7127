"""Expanding packed weights: codes times scales, into memory that the caller gives.

On CUDA by a Triton kernel, elsewhere by torch operations. The product is exact in fp32 and rounded
once, so both have the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .adamw import has_triton
from .packed_format import LEVELS, PackedFormat

_AT_ONCE = 1 << 22  # elements that torch operations expand together: bounds the temporaries
_DTYPES = (torch.float32, torch.bfloat16)


def unpack(
    codes: Tensor, scales: Tensor, format: PackedFormat, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the weights that ``format.pack`` has packed, in fp32 or bf16."""
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    unpack_(out, codes, scales, format)
    return out


def unpack_(out: Tensor, codes: Tensor, scales: Tensor, format: PackedFormat) -> None:
    """Expand into ``out``, which is contiguous and has the shape of what was packed."""
    _check(out, codes, scales, format)
    if out.numel() == 0:
        return
    if out.is_cuda and has_triton():
        from . import packed_triton  # compiles nothing, but importing Triton takes a second

        packed_triton.unpack_(out, codes, scales, format)
    else:
        _unpack_by_torch_(out, codes, scales, format)


def _unpack_by_torch_(out: Tensor, codes: Tensor, scales: Tensor, format: PackedFormat) -> None:
    columns = out.shape[-1]
    rows = out.view(-1, columns)
    blocks = -(-columns // format.block)  # of a row
    code_rows = codes.view(rows.shape[0], blocks, format.block * format.bits // 8)
    scale_rows = scales.view(rows.shape[0], blocks, 1)
    step = max(1, _AT_ONCE // columns)
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        values = _values(code_rows[part], format) * scale_rows[part].float()
        rows[part].copy_(values.flatten(1)[:, :columns])


def _values(codes: Tensor, format: PackedFormat) -> Tensor:
    """Return what codes stand for, before the scale, in fp32: (rows, blocks, block)."""
    if format.name == "int8":
        return codes.view(torch.int8).float()
    first, second = _halves(codes.device)
    index = codes.int()
    return torch.cat([first[index], second[index]], dim=-1)


@lru_cache(maxsize=8)
def _halves(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each byte, the level of its lower and of its upper four bits."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    byte = torch.arange(256)
    return levels[byte & 15].to(device), levels[byte >> 4].to(device)


def _check(out: Tensor, codes: Tensor, scales: Tensor, format: PackedFormat) -> None:
    if out.dtype not in _DTYPES:
        raise ValueError(f"weights are expanded to fp32 or bf16, not to {out.dtype}")
    if not (out.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("packed weights and what they expand into must be contiguous")
    if codes.dtype != torch.uint8 or scales.dtype != torch.bfloat16:
        raise ValueError(f"codes are uint8 and scales bf16, not {codes.dtype}, {scales.dtype}")
    if not out.device == codes.device == scales.device:
        raise ValueError(
            f"codes are on {codes.device}, scales on {scales.device}, the weights on {out.device}"
        )
    wanted = format.code_bytes(out.shape), format.num_blocks(out.shape)
    if (codes.numel(), scales.numel()) != wanted:
        raise ValueError(
            f"{tuple(out.shape)} in {format.name} has {wanted[0]} bytes of codes and {wanted[1]} "
            f"scales, not {codes.numel()} and {scales.numel()}"
        )
