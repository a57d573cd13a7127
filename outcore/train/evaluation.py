"""The loss on what was held out: the mean over all tokens that count, whatever the batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from outcore.data.batches import Batches
from outcore.engine.offload import engine_of


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A loss in nats a token, and its exponential."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(model: Any, batches: Batches) -> Evaluated:
    """Return the held-out loss; the model is in training mode again afterwards."""
    device = engine_of(model).device
    total, num_tokens = 0.0, 0
    model.eval()
    try:
        with batches:
            for batch in batches:
                count = int((batch["labels"][:, 1:] != -100).sum())
                if not count:
                    continue
                on_device = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
                total += float(model(**on_device).loss) * count
                num_tokens += count
    finally:
        model.train()
    return Evaluated(loss=total / max(1, num_tokens), num_tokens=num_tokens)
