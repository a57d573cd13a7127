"""The checksum of pages in torch operations, for bytes that are on a device and stay there.

Words are signed here: torch multiplies and adds them modulo 2^64 like unsigned ones, and a shift to
the right has the copies of the sign cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checksum import PAGE_BYTES

_NUM_LANES = 32
_CHUNK_PAGES = 2048  # what is made on the way is a quarter of their bytes
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY = 0xD6E8FEB86659FD93


def checksum_on_device(data: Tensor, *, first_page: int = 0, seed: int = 0) -> int:
    """Return what checksum_pages would; waits for the device."""
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError("a checksum is taken of contiguous bytes in one dimension")
    if data.numel() % PAGE_BYTES:
        raise ValueError(f"a checksum is taken of whole pages, not of {data.numel()} bytes")
    if data.numel() == 0:
        return 0
    pages = data.view(torch.int64).view(-1, PAGE_BYTES // (8 * _NUM_LANES), _NUM_LANES)
    sums = [
        _sum_of_pages(pages[start : start + _CHUNK_PAGES], first_page + start, seed)
        for start in range(0, len(pages), _CHUNK_PAGES)
    ]
    return int(torch.stack(sums).sum()) & _MASK


def _sum_of_pages(pages: Tensor, first_page: int, seed: int) -> Tensor:
    numbers = torch.arange(len(pages), device=pages.device)
    places = _mix(numbers * _signed(_GOLDEN) + _signed(seed + _GOLDEN * first_page))
    return _mix(_page_digests(pages) ^ places).sum()


def _page_digests(pages: Tensor) -> Tensor:
    lanes = torch.arange(1, _NUM_LANES + 1, device=pages.device) * _signed(_GOLDEN)
    for row in range(pages.shape[1]):
        lanes = _scramble(lanes ^ pages[:, row])  # [pages, lanes]
    half = _NUM_LANES // 2
    while half > 0:
        lanes = _scramble(lanes[:, :half]) ^ lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]


def _scramble(x: Tensor) -> Tensor:
    return (x ^ _shifted(x, 32)) * _signed(_MULTIPLY)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, num_bits: int) -> Tensor:
    """Return ``x`` shifted to the right as an unsigned word."""
    return (x >> num_bits) & (_MASK >> num_bits)


def _signed(word: int) -> int:
    """Return the signed number with the same 64 bits."""
    word &= _MASK
    return word - 2**64 if word >> 63 else word
