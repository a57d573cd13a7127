"""The loss on what was held out: the mean over all that counts, whatever the batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outcore.data.batches import Batches
from outcore.engine.offload import engine_of
from outcore.train.objective import Objective
from outcore.train.preference import evaluating


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A held-out loss, and over how many tokens or pairs it is a mean."""

    loss: float
    count: int
    counts: str

    @property
    def perplexity(self) -> float | None:
        """Of tokens; pairs have none."""
        return math.exp(min(self.loss, 700.0)) if self.counts == "tokens" else None


@torch.no_grad()
def evaluate(
    model: Any,
    batches: Batches,
    objective: Objective,
    *,
    stops: Callable[[], bool] = lambda: False,
) -> Evaluated | None:
    """Return the held-out loss; None if ``stops`` says so between two batches.

    The model is in training mode again afterwards.
    """
    device = engine_of(model).device
    total, count = 0.0, 0
    with evaluating(model), batches:
        for number, batch in enumerate(batches):
            if stops():
                return None
            on_device = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss, size = objective.held_out(model, on_device, number)
            if size:
                total += float(loss) * size
                count += size
    return Evaluated(loss=total / max(1, count), count=count, counts=objective.counts)
