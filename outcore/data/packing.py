"""Packing: pieces into sequences, from their lengths alone. Pure.

Best fit over a window: of the next pieces the longest first, each into the open sequence where the
least room is left. The number of open sequences is bounded too, so that the time is.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 4096  # pieces, and open sequences


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Sequence ``i`` holds the pieces ``order[firsts[i]:firsts[i + 1]]``, in this order."""

    order: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @property
    def num_sequences(self) -> int:
        return len(self.firsts) - 1

    def pieces_in(self, sequence: int) -> NDArray[np.int64]:
        return self.order[self.firsts[sequence] : self.firsts[sequence + 1]]


def pack(
    lengths: NDArray[np.int64], order: NDArray[np.int64], seq_len: int, window: int = WINDOW
) -> Packed:
    """Pack the pieces, taken in this order; the result depends on nothing else."""
    if len(lengths) and (int(lengths.min()) < 1 or int(lengths.max()) > seq_len):
        raise ValueError(f"pieces must have between 1 and {seq_len} tokens")
    sequences: list[list[int]] = []
    is_open: list[tuple[int, int]] = []  # (room, sequence), sorted
    for start in range(0, len(order), window):
        here = order[start : start + window]
        here = here[np.argsort(-lengths[here], kind="stable")]
        for piece, length in zip(here.tolist(), lengths[here].tolist(), strict=True):
            best = bisect.bisect_left(is_open, (length, 0))
            if best == len(is_open):
                room, sequence = seq_len, len(sequences)
                sequences.append([])
            else:
                room, sequence = is_open.pop(best)
            sequences[sequence].append(piece)
            if room > length:
                bisect.insort(is_open, (room - length, sequence))
        del is_open[: max(0, len(is_open) - window)]  # the fullest
    sizes = [0, *map(len, sequences)]
    flat = [piece for sequence in sequences for piece in sequence]
    return Packed(order=np.array(flat, dtype=np.int64), firsts=np.cumsum(sizes, dtype=np.int64))


def one_each(order: NDArray[np.int64], pieces_per_sequence: int = 1) -> Packed:
    """Return sequences without packing."""
    firsts = np.arange(0, len(order) + 1, pieces_per_sequence, dtype=np.int64)
    return Packed(order=order, firsts=firsts)
