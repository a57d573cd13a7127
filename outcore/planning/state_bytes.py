"""Bytes of optimizer state and of one update, by format: the arithmetic behind every tier."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.kernels.compact_format import BLOCK
from outcore.planning.plan import Job
from outcore.units import BYTES_OF

_SCALE_BYTES = 1 / BLOCK  # a scale of one byte for each block of an 8-bit moment


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter."""

    weight: int
    state: float  # moments and remainder, without the weight
    gradient: int
    num_tensors: int  # of the state
    largest_itemsize: int  # of these

    @classmethod
    def of(cls, job: Job) -> StateBytes:
        """Moments and what the weight's type rounded away of the fp32 master."""
        weight = BYTES_OF[job.dtype]
        if job.state_format == "fp32":
            state, num_tensors, largest = 8.0, 2, 4
            if job.dtype == "bf16":
                state, num_tensors = state + 2, num_tensors + 1
        else:
            state, num_tensors, largest = 2 * (1 + _SCALE_BYTES), 4, 1
            if job.state_format == "compact":
                state, num_tensors = state + 1, num_tensors + 1
        return cls(
            weight=weight,
            state=state,
            gradient=weight,
            num_tensors=num_tensors,
            largest_itemsize=largest,
        )

    @property
    def moved(self) -> float:
        """State and weight, which an update reads and writes."""
        return self.weight + self.state

    @property
    def update_traffic(self) -> float:
        """What one update reads and writes: 26 for fp32 moments and a bf16 weight."""
        return 2 * self.moved + self.gradient
