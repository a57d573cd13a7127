"""Token ids and labels in range, looked at before a forward is launched.

Inside it, one out of range would end the CUDA context. Where all is well a single flag is read
from the device. A model may replace ids before it looks them up (image tokens beyond the
vocabulary): what is refused is what reaches the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenRanges:
    """Rows of the input embedding and of the head; None where there is none."""

    embedding: int | None
    head: int | None

    def check(self, ids: Sequence[Tensor], labels: Tensor | None, ignore_index: int) -> bool:
        """Refuse labels out of range; return whether an id is, which ``check_ids`` must see.

        On CUDA this waits for what made the tokens.
        """
        flags = []
        if self.head is not None and labels is not None:
            flags.append(_bad_labels(labels, ignore_index, self.head).any())
        if self.embedding is not None:
            flags += [_out_of_range(tokens, self.embedding).any() for tokens in ids]
        if not flags or not bool(torch.stack(flags).any()):
            return False
        if self.head is not None and labels is not None:
            check_labels(labels, ignore_index, self.head)
        return True

    def check_ids(self, ids: Tensor) -> None:
        """Refuse ids that the embedding has no row for."""
        assert self.embedding is not None
        bad = _out_of_range(ids, self.embedding)
        if bool(bad.any()):
            raise IndexError(
                f"input id {int(ids[bad][0])} is out of range: the vocabulary has "
                f"{self.embedding} entries, 0 to {self.embedding - 1}. Is the tokenizer that of "
                "this model? For added tokens call resize_token_embeddings before outcore.offload."
            )


def check_labels(target: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Refuse labels outside the vocabulary; on CUDA this waits for what made the labels."""
    bad = _bad_labels(target, ignore_index, vocabulary)
    if bool(bad.any()):
        label = int(target[bad][0])
        raise ValueError(
            f"label {label} is out of range: labels are 0 to {vocabulary - 1}, or {ignore_index} "
            "for tokens without a loss"
        )


def _bad_labels(target: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    return (target != ignore_index) & _out_of_range(target, vocabulary)


def _out_of_range(tokens: Tensor, num_rows: int) -> Tensor:
    return (tokens < 0) | (tokens >= num_rows)
