"""One AdamW step over the compact state in plain torch operations. Tensors were checked before.

The same bits as the C++ and Triton kernels: every operation rounds once, as in ``adamw_torch``, and
all coding is integer arithmetic. Works in chunks of whole blocks, to keep temporaries small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import compact_format as format
from .adamw_scalars import AdamWScalars
from .adamw_torch import update_
from .compact_format import CompactMoments
from .compact_random import bits_for_exp_avg, bits_for_exp_avg_sq, keys_of, random_bits


@torch.no_grad()
def adamw_compact_(
    weight: Tensor,
    remainder: Tensor | None,
    moments: CompactMoments,
    grad: Tensor,
    *,
    scalars: AdamWScalars,
    seed: int,
    step: int,
    first_element: int,
) -> None:
    keys = keys_of(seed, step)
    weight, grad = weight.view(-1), grad.view(-1)
    remainder = None if remainder is None else remainder.view(-1)
    for begin in range(0, weight.numel(), format.CHUNK):
        chunk = slice(begin, begin + format.CHUNK)
        _step_chunk_(
            weight[chunk],
            None if remainder is None else remainder[chunk],
            format.chunk_of(moments, begin),
            grad[chunk],
            scalars,
            keys,
            first_element + begin,
        )


def _step_chunk_(
    weight: Tensor,
    remainder: Tensor | None,
    moments: CompactMoments,
    grad: Tensor,
    scalars: AdamWScalars,
    keys: tuple[int, int],
    first_element: int,
) -> None:
    n = weight.numel()
    p = weight.float() if remainder is None else format.join_master24(weight, remainder)
    p_blocks = format.to_blocks(p)
    m, v = format.read_moments(moments)
    update_(p_blocks, m, v, format.to_blocks(grad), scalars)

    random = random_bits(first_element, p_blocks.numel(), keys, weight.device)
    in_blocks = random.view(-1, format.BLOCK)
    m_random, v_random = bits_for_exp_avg(in_blocks), bits_for_exp_avg_sq(in_blocks)
    format.write_moments_(moments, m, v, m_random, v_random)
    p, random = p_blocks.view(-1)[:n], random[:n]
    if remainder is None:
        format.write_weight_(p, random & 0xFFFF, weight)
    else:
        format.write_master24_(p, random & 0xFF, weight, remainder)
