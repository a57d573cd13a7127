"""The Triton kernel behind ``unpack_``. Import only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packed_format import PackedFormat, codebook

_ELEMENTS = 4096  # of a program


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _unpack_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    codes_ptr,
    scales_ptr,
    levels_ptr,
    num_blocks,
    blocks_in_row,
    columns,
    IS_INT4: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # rows are whole blocks: element i of block b is i + b * BLOCK
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK // 2 if IS_INT4 else BLOCK  # bytes of a block
    block = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    inside = block < num_blocks
    code = tl.load(codes_ptr + block * WIDTH + i, inside, other=0)
    scale = tl.load(scales_ptr + block, inside, other=0.0).to(tl.float32)
    if IS_WHOLE:
        first = block * BLOCK
        left = BLOCK
    else:
        start = (block % blocks_in_row) * BLOCK
        first = (block // blocks_in_row) * columns + start
        left = columns - start  # columns from the block's first one on
    # Exact in fp32: the store rounds once, or not at all.
    if IS_INT4:
        low = tl.load(levels_ptr + (code & 15).to(tl.int32)) * scale
        high = tl.load(levels_ptr + (code >> 4).to(tl.int32)) * scale
        tl.store(out_ptr + first + i, low.to(out_ptr.dtype.element_ty), inside & (i < left))
        j = i + WIDTH
        tl.store(out_ptr + first + j, high.to(out_ptr.dtype.element_ty), inside & (j < left))
    else:
        value = code.to(tl.int8, bitcast=True).to(tl.float32) * scale
        tl.store(out_ptr + first + i, value.to(out_ptr.dtype.element_ty), inside & (i < left))


def unpack_(out: Tensor, codes: Tensor, scales: Tensor, format: PackedFormat) -> None:
    columns, num_blocks = out.shape[-1], scales.numel()
    num = _ELEMENTS // format.block
    with torch.cuda.device(out.device):
        _unpack_kernel[(triton.cdiv(num_blocks, num),)](
            out,
            codes,
            scales,
            codebook(out.device),
            num_blocks,
            -(-columns // format.block),
            columns,
            IS_INT4=format.name == "int4",
            IS_WHOLE=columns % format.block == 0,
            BLOCK=format.block,
            NUM=num,
            num_warps=4,
        )
