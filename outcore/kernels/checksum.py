"""The checksum of pages: what scratch on disk is verified with.

The value is defined in outcore_kernels.h. The library computes it; without one numpy does, slower
and with the same result.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from .library import check_status, library

PAGE_BYTES = 4096  # OC_PAGE_BYTES
_NUM_LANES = 32
_CHUNK_PAGES = 256  # numpy's temporaries stay in the cache, and small

Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = np.uint64(0xD6E8FEB86659FD93)
_MASK = 2**64 - 1


def checksum_pages(data: Bytes, *, first_page: int = 0, seed: int = 0) -> int:
    """Return the checksum of whole pages; those of parts of a record add up modulo 2^64."""
    if data.ndim != 1 or data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise ValueError("a checksum is taken of contiguous bytes in one dimension")
    num_pages, rest = divmod(data.size, PAGE_BYTES)
    if rest:
        raise ValueError(f"a checksum is taken of whole pages, not of {data.size} bytes")
    loaded = library()
    if loaded is None:
        return checksum_by_numpy(data, first_page=first_page, seed=seed)
    total = ctypes.c_uint64()
    pointer = ctypes.c_void_p(data.ctypes.data)
    check_status(
        loaded.oc_checksum_pages(
            pointer, num_pages, first_page & _MASK, seed & _MASK, ctypes.byref(total)
        )
    )
    return total.value


def checksum_by_numpy(data: Bytes, *, first_page: int = 0, seed: int = 0) -> int:
    """checksum_pages in numpy operations, unchecked."""
    pages = data.view("<u8").reshape(-1, PAGE_BYTES // (8 * _NUM_LANES), _NUM_LANES)
    total = 0
    for start in range(0, len(pages), _CHUNK_PAGES):
        digests = _page_digests(pages[start : start + _CHUNK_PAGES])
        numbers = np.arange(len(digests), dtype=np.uint64)
        numbers += np.uint64((first_page + start) & _MASK)
        places = _mix(np.uint64(seed & _MASK) + _GOLDEN * numbers)
        total += int(_mix(digests ^ places).sum(dtype=np.uint64))
    return total & _MASK


def _page_digests(pages: _Words) -> _Words:
    lanes: _Words = np.arange(1, _NUM_LANES + 1, dtype=np.uint64) * _GOLDEN
    lanes = np.broadcast_to(lanes, (len(pages), _NUM_LANES))  # [pages, lanes]
    for row in range(pages.shape[1]):
        lanes = _scramble(lanes ^ pages[:, row])
    half = _NUM_LANES // 2
    while half > 0:
        lanes = _scramble(lanes[:, :half]) ^ lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]


def _scramble(x: _Words) -> _Words:
    x = (x ^ (x >> np.uint64(32))) * _MULTIPLY
    return x


def _mix(x: _Words) -> _Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x
