"""Losses read one step late, so that reading one never makes the device wait."""

from __future__ import annotations

import torch
from torch import Tensor


class LaggedLoss:
    """Hands out each loss when the next one is put in; ``last`` gives the one that is left."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def put(self, loss: Tensor) -> float | None:
        """Take this step's loss and return the one before, or None."""
        before = self.last()
        if loss.is_cuda:
            copy = torch.empty((), dtype=torch.float32, pin_memory=True)
            copy.copy_(loss.detach(), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._pending = copy, arrived
        else:
            self._pending = loss.detach().float(), None
        return before

    def last(self) -> float | None:
        """Return what was put in last, once; waits for it alone."""
        if self._pending is None:
            return None
        value, arrived = self._pending
        self._pending = None
        if arrived is not None:
            arrived.synchronize()
        return float(value)
