"""Bytes of optimizer state and of one update, by format: the arithmetic behind every tier."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from outcore.kernels.compact_format import BLOCK
from outcore.planning.plan import Job
from outcore.store.record_layout import page_aligned_bytes
from outcore.units import BYTES_OF

_SCALE_BYTES = 1 / BLOCK  # a scale of one byte for each block of an 8-bit moment


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter."""

    weight: int
    gradient: int
    tensors: tuple[float, ...]  # of the state: moments and remainder, without the weight

    @classmethod
    def of(cls, job: Job) -> StateBytes:
        """Moments and what the weight's type rounded away of the fp32 master."""
        weight = BYTES_OF[job.dtype]
        if job.state_format == "fp32":
            tensors = [4.0, 4.0]
            if job.dtype == "bf16":
                tensors.append(2.0)
        else:
            tensors = [1.0, 1.0, _SCALE_BYTES, _SCALE_BYTES]
            if job.state_format == "compact":
                tensors.append(1.0)
        return cls(weight=weight, gradient=weight, tensors=tuple(tensors))

    @cached_property
    def state(self) -> float:
        return sum(self.tensors)

    def state_on_disk(self, numel: int, *, with_master: bool) -> int:
        """Return what state takes there: each of its tensors in whole pages.

        ``with_master``: of a resident weight, beside it.
        """
        tensors = (*self.tensors, self.weight) if with_master else self.tensors
        return sum(page_aligned_bytes(math.ceil(numel * each)) for each in tensors)

    @cached_property
    def moved(self) -> float:
        """State and weight, which an update reads and writes."""
        return self.weight + self.state

    @cached_property
    def update_traffic(self) -> float:
        """What one update reads and writes: 26 for fp32 moments and a bf16 weight."""
        return 2 * self.moved + self.gradient
