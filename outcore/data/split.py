"""Which examples are held out: a fraction that stays the same when rows are added or moved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outcore.data.token_cache import TokenCache

Examples = NDArray[np.int64]


def split_held_out(cache: TokenCache, fraction: float) -> tuple[Examples, Examples]:
    """Return the numbers of the examples to train on, and of those held out.

    An example's side depends on what it says alone: copies of one are on the same side.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"the fraction held out must be between 0 and 1, not {fraction}")
    hashes = cache.content_hashes[:: cache.documents_per_example]
    is_held_out = hashes < np.uint64(int(fraction * 2**64))
    training, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    if not len(training) or not len(held_out):
        raise ValueError(
            f"of {cache.num_examples} examples, {fraction:g} held out leaves one side empty: "
            "choose another fraction, or hold out a file of its own"
        )
    return training, held_out
