"""The pieces of documents that fit a sequence: an index, made from lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from outcore.data.split import Examples
from outcore.data.token_cache import TokenCache

TooLong = Literal["cut", "split"]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Where each piece lies in the cache, and what became of documents that were too long."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_cut: int  # examples of which, or of whose pair, only the first tokens are used
    num_split: int  # documents of which several pieces were made
    num_dropped: int  # examples with nothing to learn from in their first seq_len tokens


def pieces_of(cache: TokenCache, examples: Examples, seq_len: int, too_long: TooLong) -> Pieces:
    """Return pieces of at most ``seq_len`` tokens, in the order of ``examples``."""
    if too_long == "split":
        return _split(cache, examples, seq_len)
    per_example = cache.documents_per_example
    # (examples, documents of one): a pair stays together, so also goes together.
    documents = examples[:, None] * per_example + np.arange(per_example)
    lengths = (cache.ends - cache.starts)[documents]
    first_counted = cache.first_counted[documents]
    keeps = (first_counted < np.minimum(lengths, seq_len)).all(axis=1)
    is_cut = keeps & (lengths > seq_len).any(axis=1)
    lengths = lengths[keeps].ravel()
    return Pieces(
        starts=cache.starts[documents[keeps].ravel()],
        lengths=np.minimum(lengths, seq_len),
        num_cut=int(is_cut.sum()),
        num_split=0,
        num_dropped=int((~keeps).sum()),
    )


def _split(cache: TokenCache, examples: Examples, seq_len: int) -> Pieces:
    starts, ends = cache.starts[examples], cache.ends[examples]
    num_pieces = -(-(ends - starts) // seq_len)
    owner = np.repeat(np.arange(len(examples)), num_pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    piece_starts = starts[owner] + number * seq_len
    lengths = np.minimum(ends[owner] - piece_starts, seq_len)
    # A token by itself is predicted from nothing: a batch of such pieces alone would have no loss.
    keeps = lengths > 1
    return Pieces(
        starts=piece_starts[keeps],
        lengths=lengths[keeps],
        num_cut=0,
        num_split=int((num_pieces > 1).sum()),
        num_dropped=len(examples) - len(np.unique(owner[keeps])),
    )
