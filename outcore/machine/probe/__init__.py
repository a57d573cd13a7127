"""Measures this machine once: copies, host memory, disk, arithmetic, and what the tiers have free.

Owns the measurements, the report that they make and the file where it is kept. What a plan does
with the figures is no concern of this room.
"""

from __future__ import annotations

from .report import ProbeReport
from .run import found_gpu_direct_storage, probe
from .sizes import FULL, QUICK, ProbeSizes

__all__ = ["FULL", "QUICK", "ProbeReport", "ProbeSizes", "found_gpu_direct_storage", "probe"]
