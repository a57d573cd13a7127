"""The loss on what was held out: the mean over all that counts, whatever the batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
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
    more: dict[str, float] = field(default_factory=dict)  # what the objective tells beside it

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
    progress: Callable[[int, int], None] = lambda number, total: None,
) -> Evaluated | None:
    """Return the held-out loss; None if ``stops`` says so between two batches.

    progress: is told, before each batch, which it is and of how many.
    The model is in training mode again afterwards.
    """
    device, num_batches = engine_of(model).device, batches.num_batches
    assert num_batches is not None  # held-out data goes through once
    totals, count = [0.0 for _ in ("loss", *objective.figures)], 0
    with evaluating(model), batches:
        for number, batch in enumerate(batches):
            if stops():
                return None
            progress(number + 1, num_batches)
            on_device = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            values, size = objective.held_out(model, on_device, number)
            if size:
                totals = [t + float(v) * size for t, v in zip(totals, values, strict=True)]
                count += size
    loss, *others = (total / max(1, count) for total in totals)
    more = dict(zip(objective.figures, others, strict=True))
    return Evaluated(loss=loss, count=count, counts=objective.counts, more=more)
