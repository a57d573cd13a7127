"""Buffers that a block's forward changes while it trains, such as BatchNorm's running statistics.

A forward changes them once, whatever becomes of its activations: a recompute works on copies of
what the forward found. Such a block runs over the whole batch at once, because the statistics that
it normalises with, and what it writes, are the batch's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Found = dict[str, tuple[Tensor, int]]
"""By name: a buffer's value before a forward, and how often it had been written to."""


class BlockBuffers:
    """The buffers of one block, under the names that functional_call knows them by."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        norms = [(n, m) for n, m in block.named_modules() if isinstance(m, _BatchNorm)]
        self._norms = [norm for _, norm in norms]
        # torch counts no write where BatchNorm updates its statistics: they are known by its class.
        self._changing = {
            ".".join(["block", *filter(None, [name]), buffer])
            for name, norm in norms
            for buffer, _ in norm.named_buffers(recurse=False)
        }
        # Until a forward has shown which others change.
        self._is_new = next(block.buffers(), None) is not None

    @property
    def need_whole_batch(self) -> bool:
        return any(norm.training for norm in self._norms)

    def found(self) -> Found:
        """Before a forward: return copies of the buffers that it changes, or may change."""
        is_training = self._block.training or self.need_whole_batch
        if not is_training or not (self._is_new or self._changing):
            return {}
        return {
            name: (buffer.detach().clone(), _num_writes(buffer))
            for name, buffer in self._named()
            if self._is_new or name in self._changing
        }

    def learn(self, found: Found) -> bool:
        """After a forward: drop from ``found`` what stays; whether more changed than known."""
        if found and self._is_new:
            self._is_new = False
            now = dict(self._named())
            others = {
                name
                for name, (_, writes) in found.items()
                if name in now and _num_writes(now[name]) != writes
            } - self._changing
            self._changing |= others
            for name in found.keys() - self._changing:
                del found[name]
            return bool(others)
        return False

    def restore(self, found: Found) -> None:
        """Undo what a forward changed."""
        with torch.no_grad():
            for name, buffer in self._named():
                if name in found:
                    buffer.copy_(found[name][0])

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(f"block.{name}", buffer) for name, buffer in self._block.named_buffers()]


def copies(found: Found) -> dict[str, Tensor]:
    """Return buffers for a recompute to read and change."""
    return {name: value.clone() for name, (value, _) in found.items()}


def _num_writes(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
