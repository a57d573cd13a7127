"""The plan as one HTML page that needs nothing else: no network, no files, no fonts.

Names in a plan may be hostile: every text is escaped, and the page's own policy allows no script
but the one whose hash it names, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from outcore.machine.machine import Machine
from outcore.planning.compare import (
    Comparison,
    Way,
    assumption_sentences,
    format_duration,
    format_tokens,
    verdict_sentences,
)
from outcore.planning.plan import Plan
from outcore.planning.smaller_budget import SmallerBudget
from outcore.units import format_rate, format_seconds
from outcore.views.page_memory import memory_bars
from outcore.views.page_style import SCRIPT, STYLE
from outcore.views.page_text import table, text
from outcore.views.page_tiles import RunFigures, figures_of_step, tiles
from outcore.views.page_timeline import end_s, timeline
from outcore.views.side_by_side import Measurement, side_by_side
from outcore.views.words import (
    binding_sentence,
    budget_bytes,
    home_rows,
    job_sentence,
    lane_uses,
    wall_sentence,
)


def plan_page(
    plan: Plan,
    *,
    machine: Machine | None = None,
    smaller: SmallerBudget | None = None,
    measured: Measurement | None = None,
    figures: RunFigures | None = None,
    comparison: Comparison | None = None,
    notes: Sequence[str] = (),
    title: str | None = None,
    first: Sequence[tuple[str, str]] = (),
    last: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the whole page; ``measured`` adds a second timeline and figures side by side.

    ``figures``: of a whole run, for the top; without them those of ``measured``.
    ``notes``: what else to keep in mind, a sentence each.
    ``first``, ``last``: headings and HTML of sections around the plan's own.
    """
    if figures is None and measured is not None:
        figures = figures_of_step(plan, measured)
    title = title or f"{plan.model} on {plan.machine}"
    sections = [_section(heading, body) for heading, body in first]
    sections += [
        _section("What it means", _findings(plan, smaller, notes)),
        _section("A step, lane by lane", _timelines(plan, measured)),
    ]
    if measured is not None:
        sections.append(_section("Prediction and measurement", _side_by_side(plan, measured)))
    sections += [
        _section("Use of each lane", _lanes(plan)),
        _section("Memory at its peak", memory_bars(plan, budget_bytes(plan, machine))),
        _section("Where everything lives", _homes(plan)),
    ]
    if comparison is not None:
        sections.append(_section("Offload, or more GPUs?", _comparison(comparison)))
    sections += [_section(heading, body) for heading, body in last]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)} – Outcore</title>\n<style>\n{STYLE}\n</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{text(title)}</h1>\n"
        f'<p class="quiet">{text(job_sentence(plan))}</p>\n'
        f"{tiles(plan, figures)}\n{''.join(sections)}</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _section(heading: str, body: str) -> str:
    name = heading.lower().replace(" ", "-").strip("?").replace(",", "")
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{body}</section>\n'


def _findings(plan: Plan, smaller: SmallerBudget | None, notes: Sequence[str]) -> str:
    sentences = [binding_sentence(plan), wall_sentence(plan)]
    if smaller is not None:
        sentences.append(smaller.sentence(plan))
    return _list([*sentences, *notes])


def _list(sentences: list[str]) -> str:
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f'<ul class="findings">{items}</ul>'


def _timelines(plan: Plan, measured: Measurement | None) -> str:
    predicted = plan.prediction.timeline
    step_s = total_s = max(plan.prediction.step_s, end_s(predicted))
    measured_s = 0.0
    if measured is not None:  # one scale, so that lengths can be compared
        measured_s = max(measured.step_s, end_s(measured.spans))
        total_s = max(step_s, measured_s)
    tools = "".join(
        f'<button type="button" data-act="{act}" aria-label="{label}">{sign}</button>'
        for act, label, sign in (
            ("in", "zoom in", "+"),
            ("out", "zoom out", "−"),
            ("left", "earlier", "←"),
            ("right", "later", "→"),
            ("all", "whole step", "whole step"),
        )
    )
    hint = "Also with + − ← → 0 on a timeline, Ctrl and the wheel, or by dragging."
    parts = [
        f'<div class="tools" hidden>{tools}<span class="quiet">{hint}</span></div>',
        timeline("Predicted", predicted, step_s, total_s),
    ]
    if measured is not None:
        parts.append(timeline("Measured", measured.spans, measured_s, total_s))
    parts.append('<p class="readout quiet" aria-live="polite">Point at a piece of work.</p>')
    return "".join(parts)


def _side_by_side(plan: Plan, measured: Measurement) -> str:
    rows = []
    for row in side_by_side(plan, measured):
        *cells, verdict = (text(cell) for cell in row.cells())
        style = "bad" if row.verdict.startswith("not") else "good"
        rows.append([*cells, f'<span class="{style}">{verdict}</span>'])
    headers = ["figure", "predicted", "measured", "difference", "promise"]
    return table("Prediction and measurement", headers, rows, numbers=(1, 2, 3))


def _lanes(plan: Plan) -> str:
    uses = lane_uses(plan)
    rows = [
        [
            text(use.lane),
            f"{format_seconds(use.busy_s)} s",
            f"{use.share:.0%}",
            "binds" if use.binds else "",
        ]
        for use in uses
    ]
    binding = [index for index, use in enumerate(uses) if use.binds]
    headers = ["lane", "busy", "of the step", ""]
    return table("Use of each lane", headers, rows, numbers=(1, 2), emphasised=binding)


def _homes(plan: Plan) -> str:
    rows = [
        [text(cell) for cell in (row.label, row.weights, row.state, row.gradients, row.activations)]
        for row in home_rows(plan)
    ]
    headers = ["blocks", "weights", "optimizer state", "gradients", "activations"]
    return table("Homes", headers, rows)


def _comparison(comparison: Comparison) -> str:
    rows = [["offloading", *_way_cells(comparison.offload)]]
    if comparison.resident is not None:
        rows.append(["without offloading", *_way_cells(comparison.resident)])
    headers = [
        f"{format_tokens(comparison.train_tokens)} tokens",
        f"{comparison.device}s",
        "tokens/s",
        "time",
        "money",
    ]
    assumptions = "".join(
        f'<p class="quiet">{text(sentence)}</p>' for sentence in assumption_sentences(comparison)
    )
    return (
        table("Offload, or more GPUs?", headers, rows, numbers=(1, 2, 3, 4))
        + _list(verdict_sentences(comparison))
        + assumptions
    )


def _way_cells(way: Way) -> list[str]:
    money = "–" if way.dollars is None else f"${way.dollars:,.2f}"
    cells = (f"{way.num_gpus}", format_rate(way.tokens_per_s), format_duration(way.seconds), money)
    return [text(cell) for cell in cells]
