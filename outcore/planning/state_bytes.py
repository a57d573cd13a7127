"""Bytes of optimizer state and of one update, by format: the arithmetic behind every tier."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.model_spec import BYTES_OF
from outcore.planning.plan import Job

_SCALE_BYTES = 4 / 128  # an fp32 scale for each 128 elements of an 8-bit moment


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter."""

    weight: int
    state: float  # moments and remainder, without the weight
    gradient: int

    @classmethod
    def of(cls, job: Job) -> StateBytes:
        """Moments and what the weight's type rounded away of the fp32 master."""
        weight = BYTES_OF[job.dtype]
        if job.state_format == "fp32":
            state = 8.0 + (2 if job.dtype == "bf16" else 0)
        else:
            state = 2 * (1 + _SCALE_BYTES)
            if job.state_format == "compact" and job.dtype == "bf16":
                state += 1
        return cls(weight=weight, state=state, gradient=weight)

    @property
    def moved(self) -> float:
        """State and weight, which an update reads and writes."""
        return self.weight + self.state

    @property
    def update_traffic(self) -> float:
        """What one update reads and writes: 26 for fp32 moments and a bf16 weight."""
        return 2 * self.moved + self.gradient
