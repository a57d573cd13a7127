"""Micro-batches: how a block's inputs are cut along the batch, and its outputs put together.

The batch is split inside each block (*layer-major*), so that weights are copied once a pass
whatever the batch. Which inputs carry the batch is read off their shapes; where that could be
ambiguous, the block runs over the whole batch at once: right, only with more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outcore.planning.micro_batch import pick_micro_batch

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class MicroBatches:
    """The cuts of one block call."""

    def __init__(self, leaves: Sequence[Any], micro_batch: int | None) -> None:
        """``leaves``: the call's flattened arguments; ``micro_batch``: sequences, None to pick."""
        hidden = next(
            (x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3),
            None,
        )
        self.batch, self._length = (1, 0) if hidden is None else hidden.shape[:2]
        if self.batch == 0:
            raise ValueError("the batch has 0 sequences")
        size = self.batch
        if hidden is not None and _can_split(leaves, hidden):
            size = _pick(hidden) if micro_batch is None else min(micro_batch, self.batch)
        self.bounds = [(lo, min(lo + size, self.batch)) for lo in range(0, self.batch, size)]

    @property
    def is_split(self) -> bool:
        return len(self.bounds) > 1

    @property
    def is_even(self) -> bool:
        """Whether the last micro-batch is as large as the others."""
        (first, to_first), (last, to_last) = self.bounds[0], self.bounds[-1]
        return to_first - first == to_last - last

    def whole(self) -> None:
        """Give up splitting this call."""
        self.bounds = [(0, self.batch)]

    def carries_batch(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() >= 2 and leaf.shape[0] == self.batch

    def cut(self, leaf: Any, bounds: tuple[int, int]) -> Any:
        if self.is_split and self.carries_batch(leaf):
            return leaf[bounds[0] : bounds[1]]
        return leaf

    def rows(self, part: Tensor, bounds: tuple[int, int]) -> int | None:
        """Return how many leading rows an output has for each sequence; None if it has no batch.

        Router logits, for example, come flattened to (sequences x tokens, experts). Other outputs
        of fewer than three axes may be sums over the batch: (experts,), (1,), (1, experts).
        """
        sequences = bounds[1] - bounds[0]
        if part.dim() < 2 or part.shape[0] % sequences or (part.shape[0] == 1 < sequences):
            return None
        rows = part.shape[0] // sequences
        if part.dim() == 2 and rows != self._length:
            return None
        if part.dim() == 3 and part.shape[1] == 1 < self._length:  # (1, 1, experts)
            return None
        return rows

    def can_put_together(self, part: Tensor, rows: int | None) -> bool:
        """Whether the whole batch's output follows from those of micro-batches.

        Without a batch, each of them gives the same: a bias of positions, (1, heads, ...).
        """
        return not self.is_split or rows is not None or (part.dim() >= 4 and part.shape[0] == 1)


def _pick(hidden: Tensor) -> int:
    return pick_micro_batch(hidden.shape[0], hidden.shape[1], device_type=hidden.device.type)


def _can_split(leaves: Sequence[Any], hidden: Tensor) -> bool:
    batch, length, size = hidden.shape
    if batch == 1:
        return False
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # A (length, ...) table is told from a (batch, ...) one only if the two differ.
            if batch == length and leaf.dim() == 2:
                return False
            if leaf.dim() >= 3 and leaf.shape[0] not in (1, batch):
                return False  # batch x heads rows (Bloom's alibi), or an axis before the batch
            # (3, batch, length, dim), Qwen2-VL's rotary tables, or a bias of (batch, heads, ...).
            if leaf.dim() >= 4 and leaf.shape[:2] == (batch, batch):
                return False
            if leaf.shape[:1] == (batch,) and not _carries_batch(leaf, length, size):
                return False
        elif not isinstance(leaf, _PLAIN):
            return False  # a cache, for example: its contents follow the batch
    return True


def _carries_batch(leaf: Tensor, length: int, size: int) -> bool:
    """Whether a first axis of the batch's size can be nothing but the batch."""
    if leaf.dim() == 1:
        return False  # (batch,), or one for each position of as many
    if leaf.dim() == 2 and leaf.is_floating_point():
        # (batch, length), or a table of as many rows, as DeBERTa's of (2 x span, hidden).
        return leaf.shape[1] == length != size
    if leaf.dim() == 3:
        # (batch, length, ...), (batch, other length, hidden), or MPT's (heads, 1, longest).
        return leaf.shape[1] == length or (leaf.shape[2] == size and leaf.shape[1] != 1)
    return True
