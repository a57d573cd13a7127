"""Prediction and measurement of one step, side by side: time, lanes and memory.

``Measurement`` is what a run records. A row is right when it is within the share that Outcore
promises: 10% of a step's time, 5% of a tier's peak bytes. Lanes are shown without a promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.markup import escape

from outcore.fitting_table import FittingTable
from outcore.planning.plan import CHECKPOINT_STAGING, LANES, Plan, Span
from outcore.units import format_bytes, format_rate
from outcore.views.words import TIERS, printable

STEP_TOLERANCE = 0.10
BYTES_TOLERANCE = 0.05
# What no device holds but one that is the host too.
_OF_HOSTS = ("disk staging", CHECKPOINT_STAGING)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A step as it was: its wall time, the work of each lane, and the peak bytes of each tier."""

    step_s: float
    spans: tuple[Span, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()  # purposes of the device that these bytes are without


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, predicted and measured."""

    what: str
    unit: Literal["s", "tokens/s", "bytes"]
    predicted: float
    measured: float
    tolerance: float | None = None  # relative to the measured figure; None: nothing promised

    @property
    def difference(self) -> float | None:
        """Return by which share the prediction is too high; None where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured > 0 else None

    @property
    def verdict(self) -> str:
        if self.tolerance is None or self.difference is None:
            return ""
        is_right = abs(self.difference) <= self.tolerance
        return f"within {self.tolerance:.0%}" if is_right else f"not within {self.tolerance:.0%}"

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the row as texts: what, predicted, measured, difference, verdict."""
        difference = "–" if self.difference is None else f"{self.difference:+.1%}"
        shown = (_figure(self.predicted, self.unit), _figure(self.measured, self.unit))
        return (printable(self.what), *shown, difference, self.verdict)


def busy_s(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds in which each lane works; pieces that overlap count once."""
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    return {lane: _covered_s(pieces) for lane, pieces in by_lane.items()}


def _covered_s(spans: Sequence[Span]) -> float:
    total, end_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        total += max(0.0, span.end_s - max(span.start_s, end_s))
        end_s = max(end_s, span.end_s)
    return total


def side_by_side(plan: Plan, measured: Measurement) -> list[Row]:
    """Return the rows: the step, then lanes that work in either, then tiers that were measured."""
    predicted = plan.prediction
    rows = [
        Row(
            what="step",
            unit="s",
            predicted=predicted.step_s,
            measured=measured.step_s,
            tolerance=STEP_TOLERANCE,
        ),
        Row(
            what="speed",
            unit="tokens/s",
            predicted=predicted.tokens_per_s,
            measured=plan.job.tokens / measured.step_s if measured.step_s > 0 else 0.0,
        ),
    ]
    measured_busy_s = busy_s(measured.spans)
    seen = [*predicted.busy_s, *measured_busy_s]
    for lane in [*LANES, *dict.fromkeys(lane for lane in seen if lane not in LANES)]:
        before, after = predicted.busy_s.get(lane, 0.0), measured_busy_s.get(lane, 0.0)
        if before > 0 or after > 0:
            rows.append(Row(what=f"{lane} busy", unit="s", predicted=before, measured=after))
    return [*rows, *_memory_rows(plan, measured)]


def _memory_rows(plan: Plan, measured: Measurement) -> list[Row]:
    """Return the tiers' rows; device and host are one where the plan counts both as the device."""
    measured_bytes = dict(measured.peak_bytes)
    names = {tier: f"{tier} peak" for tier in TIERS}
    if any(purpose in plan.peak_bytes.get("device", {}) for purpose in _OF_HOSTS):
        measured_bytes["device"] = measured_bytes.get("device", 0) + measured_bytes.pop("host", 0)
        names["device"] = "device and host peak"
    rows = []
    for tier in TIERS:
        if tier in measured_bytes:
            unseen = measured.unseen if tier == "device" else ()
            purposes = plan.peak_bytes.get(tier, {})
            rows.append(
                Row(
                    what=" without ".join([names[tier], *unseen]),
                    unit="bytes",
                    predicted=sum(n for what, n in purposes.items() if what not in unseen),
                    measured=measured_bytes[tier],
                    tolerance=BYTES_TOLERANCE,
                )
            )
    return rows


def side_by_side_table(rows: Iterable[Row]) -> FittingTable:
    """Return the rows as a table for the terminal."""
    table = FittingTable()
    table.add_column("", no_wrap=True)
    for header in ("predicted", "measured", "difference"):
        table.add_column(header, justify="right")
    table.add_column("promise")
    for row in rows:
        what, predicted, measured, difference, verdict = row.cells()
        style = "red" if verdict.startswith("not") else "green"
        table.add_row(escape(what), predicted, measured, difference, f"[{style}]{verdict}[/]")
    return table


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    return f"{format_rate(value)} {unit}" if unit == "tokens/s" else f"{value:.3f} {unit}"
