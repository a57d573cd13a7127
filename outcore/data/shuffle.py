"""A random order that is the same for ever: from counters, not from a library's generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1


def shuffled(num: int, *key: int) -> NDArray[np.int64]:
    """Return 0 to ``num`` - 1 in an order that depends on the key alone."""
    start = 0
    for number in key:
        start = int(_mixed(np.array([(start + number) & _MASK], dtype=np.uint64))[0])
    keys = _mixed(np.arange(num, dtype=np.uint64) + np.uint64(start))
    return np.argsort(keys, kind="stable").astype(np.int64)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64."""
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed
