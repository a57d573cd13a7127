"""Spans of work on lanes: the form in which a step is predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass

LANES = ("compute", "to device", "to host", "host cores", "disk read", "disk write")


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work of a simulated or measured step."""

    lane: str
    name: str
    start_s: float
    end_s: float
