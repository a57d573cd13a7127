"""Sequences as arrays: the tokens of their pieces, labels, and positions or an attention mask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outcore.data.pieces import Pieces
from outcore.data.token_cache import TokenCache

NO_LABEL = -100  # what the losses of torch and transformers leave out

Arrays = dict[str, NDArray[np.int64]]


def packed_rows(
    cache: TokenCache, pieces: Pieces, rows: list[NDArray[np.int64]], seq_len: int
) -> Arrays:
    """Return input_ids, labels and position_ids, each (rows, seq_len).

    Positions restart with each piece, which is how transformers tells that none may attend to
    another. What is left over at the end is a piece of padding by itself.
    """
    input_ids, labels = _empty(len(rows), seq_len, cache.pad_token_id)
    position_ids = np.zeros((len(rows), seq_len), dtype=np.int64)
    for row, members in enumerate(rows):
        place = 0
        for piece in members.tolist():
            length = int(pieces.lengths[piece])
            here = slice(place, place + length)
            _fill(cache, pieces, piece, input_ids[row, here], labels[row, here])
            position_ids[row, here] = np.arange(length)
            place += length
        position_ids[row, place:] = np.arange(seq_len - place)
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def padded_rows(cache: TokenCache, pieces: Pieces, members: list[int], width: int) -> Arrays:
    """Return input_ids, labels and attention_mask, each (pieces, width), padded at the end."""
    input_ids, labels = _empty(len(members), width, cache.pad_token_id)
    attention_mask = np.zeros((len(members), width), dtype=np.int64)
    for row, piece in enumerate(members):
        here = slice(0, int(pieces.lengths[piece]))
        _fill(cache, pieces, piece, input_ids[row, here], labels[row, here])
        attention_mask[row, here] = 1
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def _empty(
    num_rows: int, width: int, pad_token_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    shape = (num_rows, width)
    return (
        np.full(shape, pad_token_id, dtype=np.int64),
        np.full(shape, NO_LABEL, dtype=np.int64),
    )


def _fill(
    cache: TokenCache,
    pieces: Pieces,
    piece: int,
    ids: NDArray[np.int64],
    labels: NDArray[np.int64],
) -> None:
    start, length = int(pieces.starts[piece]), int(pieces.lengths[piece])
    ids[:] = cache.ids(start, length)
    labels[:] = np.where(cache.counts(start, length), ids, NO_LABEL)
    # Losses shift labels by one, so this one would be predicted from the piece before.
    labels[:1] = NO_LABEL
