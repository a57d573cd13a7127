"""The learning rate as a pure function of the step, so that nothing of it needs to be saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outcore.train.settings import Schedule


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Warm-up from almost nothing, then a curve down to ``least`` of the peak."""

    peak: float
    schedule: Schedule
    num_steps: int
    num_warmup_steps: int
    least: float = 0.0

    def at(self, step: int) -> float:
        """Return the rate of the ``step``-th update, counted from 0."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        if self.schedule == "constant":
            return self.peak
        length = max(1, self.num_steps - self.num_warmup_steps)
        done = min(1.0, (step - self.num_warmup_steps) / length)
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.least + (1 - self.least) * left)


def warmup_steps(warmup: float, num_steps: int) -> int:
    """Return the steps of a warm-up that is given as a part of all steps, or as steps."""
    steps = math.ceil(warmup * num_steps) if warmup < 1 else round(warmup)
    return min(steps, num_steps)
