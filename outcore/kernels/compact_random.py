"""The random bits of stochastic rounding: a counter-based generator in 32-bit integer arithmetic.

The bits of an element depend on seed, step and the element's index alone, so they are the same on
every device and however an array is split. Defined in ``kernels/outcore_kernels.h``. torch has no
arithmetic on unsigned numbers: here they are int32, whose sums and products wrap, and whose right
shifts are masked because they would bring in the sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def signed32(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    return ((value + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


# Multipliers; the Triton kernel has the same.
GOLDEN32 = signed32(0x9E3779B1)
FIRST = signed32(0x7FEB352D)
SECOND = signed32(0x846CA68B)


def keys_of(seed: int, step: int) -> tuple[int, int]:
    """The two int32 keys of one step; `seed` and `step` count modulo 2^64."""
    z = _mix(_mix(seed + _GOLDEN) + step + _GOLDEN)
    return signed32(z), signed32(z >> 32)


def _mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def random_bits(first_element: int, n: int, keys: tuple[int, int], device: torch.device) -> Tensor:
    """32 random bits (int32) for each of `n` elements; the master's come from the low ones."""
    element = torch.arange(first_element, first_element + n, device=device)  # int64
    # What does not fit an int32 wraps around in the cast.
    x = (element >> 32).to(torch.int32).mul_(GOLDEN32).add_(element.to(torch.int32)).add_(keys[0])
    x = (x ^ shift_right(x, 16)).mul_(FIRST)
    x = (x ^ shift_right(x, 15)).bitwise_xor_(keys[1]).mul_(SECOND)
    return x ^ shift_right(x, 16)


def bits_for_exp_avg(random: Tensor) -> Tensor:
    return shift_right(random, 12)


def bits_for_exp_avg_sq(random: Tensor) -> Tensor:
    return (random >> 5).bitwise_and_(0x7FFFF)


def shift_right(x: Tensor, places: int) -> Tensor:
    """`x` (int32) as an unsigned number, shifted right."""
    return (x >> places).bitwise_and_((1 << (32 - places)) - 1)
