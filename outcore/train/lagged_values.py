"""A step's loss and figures, read one step late, so that reading never makes the device wait."""

from __future__ import annotations

import torch
from torch import Tensor


class LaggedValues:
    """Hands out each step's values when the next ones are put in; ``last`` gives those left."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def put(self, values: Tensor) -> list[float] | None:
        """Take this step's values (of one axis) and return those before, or None."""
        before = self.last()
        if values.is_cuda:
            copy = torch.empty(values.shape, dtype=torch.float32, pin_memory=True)
            copy.copy_(values.detach(), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(values.device))
            self._pending = copy, arrived
        else:
            self._pending = values.detach().float(), None
        return before

    def last(self) -> list[float] | None:
        """Return what was put in last, once; waits for it alone."""
        if self._pending is None:
            return None
        values, arrived = self._pending
        self._pending = None
        if arrived is not None:
            arrived.synchronize()
        return [float(value) for value in values]
