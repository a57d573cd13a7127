"""The figures at the top of a page: of a plan as predicted, of a run as measured where they are.

On a run's page each figure that could be either says which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outcore.planning.plan import Plan
from outcore.units import format_bytes, format_rate, format_seconds
from outcore.views.page_text import text
from outcore.views.side_by_side import Measurement


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What was measured of a run; None, or no such tier, where that is not known."""

    step_s: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)


def figures_of_step(plan: Plan, measured: Measurement) -> RunFigures:
    """Return those of one recorded step."""
    peaks = dict(measured.peak_bytes)
    if measured.unseen:  # the books alone are not all of it
        peaks.pop("device", None)
    if measured.step_s <= 0:
        return RunFigures(peak_bytes=peaks)
    return RunFigures(
        step_s=measured.step_s,
        tokens_per_s=plan.job.tokens / measured.step_s,
        tflops=plan.prediction.tflops * plan.prediction.step_s / measured.step_s,
        peak_bytes=peaks,
    )


def tiles(plan: Plan, run: RunFigures | None = None) -> str:
    """Return the tiles of a plan, or of a run of it."""
    predicted = _figures(
        RunFigures(
            step_s=plan.prediction.step_s,
            tokens_per_s=plan.prediction.tokens_per_s,
            tflops=plan.prediction.tflops,
            peak_bytes={
                "device": plan.tier_bytes("device"),
                "host": plan.tier_bytes("host"),
                **({"disk": plan.tier_bytes("disk")} if plan.tier_bytes("disk") else {}),
            },
        ),
        plan.prediction.binding_lane,
    )
    if run is None:
        shown = [("predicted step" if n == "step" else n, figure) for n, figure in predicted]
    else:
        measured = dict(_figures(run))
        shown = [
            (f"measured {name}", measured[name])
            if name in measured
            else (f"predicted {name}", figure)
            for name, figure in predicted
        ]
    # These are the plan's to choose, and a run does as it says.
    shown += [("micro-batch", f"{plan.micro_batch}"), ("slots", f"{plan.num_slots}")]
    tiles = "".join(
        f'<div class="tile"><dt>{text(name)}</dt><dd>{text(figure)}</dd></div>'
        for name, figure in shown
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _figures(of: RunFigures, binding_lane: str | None = None) -> list[tuple[str, str]]:
    """Return those that are known, by their names on the page."""
    figures = [
        ("step", None if of.step_s is None else f"{format_seconds(of.step_s)} s"),
        ("tokens/s", None if of.tokens_per_s is None else format_rate(of.tokens_per_s)),
        ("TFLOPS", None if of.tflops is None else format_rate(of.tflops)),
        ("binding lane", binding_lane),
        *(
            (name, format_bytes(of.peak_bytes[tier]))
            for tier, name in (("device", "device peak"), ("host", "host peak"), ("disk", "disk"))
            if tier in of.peak_bytes
        ),
    ]
    return [(name, figure) for name, figure in figures if figure is not None]
