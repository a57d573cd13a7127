"""The plan for people, as rich tables: homes, memory, lanes, and what binds.

The facts and sentences come from ``words``; here they are only laid out.
"""

from __future__ import annotations

from typing import Literal

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from outcore.fitting_table import FittingTable
from outcore.machine.machine import Machine
from outcore.planning.plan import Plan
from outcore.planning.smaller_budget import SmallerBudget
from outcore.units import format_bytes, format_rate, format_seconds
from outcore.views.words import (
    TIERS,
    binding_sentence,
    budget_bytes,
    home_rows,
    job_sentence,
    lane_uses,
    printable,
    wall_sentence,
)

_BAR_WIDTH = 20


def explain(
    plan: Plan, *, machine: Machine | None = None, smaller: SmallerBudget | None = None
) -> RenderableType:
    """Return the whole explanation. Without a machine, only budgets that were asked for show."""
    parts: list[RenderableType] = [
        _header(plan),
        "",
        homes_table(plan),
        "",
        memory_table(plan, machine),
        "",
        lanes_table(plan),
        "",
        *conclusions(plan, smaller),
    ]
    return Group(*parts)


def _header(plan: Plan) -> RenderableType:
    prediction = plan.prediction
    lines = [
        f"[bold]{_shown(plan.model)}[/] on [bold]{_shown(plan.machine)}[/]: {job_sentence(plan)}",
        f"predicted: [bold]{format_seconds(prediction.step_s)} s[/] a step, "
        f"[bold]{format_rate(prediction.tokens_per_s)}[/] tokens/s, "
        f"[bold]{format_rate(prediction.tflops)}[/] TFLOPS",
        f"[dim]micro-batch {plan.micro_batch} sequences, {plan.num_slots} slots, "
        f"{plan.num_visits} state chunks with buffers on the device[/]",
    ]
    return Text.from_markup("\n".join(lines))


def homes_table(plan: Plan) -> FittingTable:
    """Return where everything lives between uses."""
    table = _table("home of", "weights", "optimizer state", "gradients", "activations")
    for row in home_rows(plan):
        table.add_row(
            row.label,
            _tier(row.weights),
            _tier(row.state),
            _tier(row.gradients),
            row.activations,
        )
    return table


def memory_table(plan: Plan, machine: Machine | None = None) -> FittingTable:
    """Return the bytes of each tier by purpose, largest first, and the peak against the budget."""
    columns = "memory", "purpose", "bytes", "of budget"
    table = _table(*columns, right=(2, 3), whole=(0, 1, 2), goes_first=("of budget",))
    budgets = budget_bytes(plan, machine)
    for tier in TIERS:
        purposes = sorted(plan.peak_bytes.get(tier, {}).items(), key=lambda item: -item[1])
        if not purposes:
            continue
        budget, used = budgets.get(tier), plan.tier_bytes(tier)
        for index, (purpose, size) in enumerate(purposes):
            table.add_row(
                _tier(tier) if index == 0 else "",
                _shown(purpose),
                format_bytes(size),
                f"{size / budget:.0%}" if budget else "",
            )
        is_over = budget is not None and used > budget
        peak = f"{used / budget:.0%} of {format_bytes(budget)}" if budget else ""
        style = "bold red" if is_over else "bold"
        table.add_row(
            "",
            f"[{style}]peak[/]",
            f"[{style}]{format_bytes(used)}[/]",
            f"[{style}]{peak}{', over' if is_over else ''}[/]",
            end_section=True,
        )
    return table


def lanes_table(plan: Plan) -> FittingTable:
    """Return how busy each lane is."""
    table = _table("lane", "busy s", "of the step", "", right=(1,), whole=(0, 1, 2))
    for use in lane_uses(plan):
        filled = min(_BAR_WIDTH, round(use.share * _BAR_WIDTH))
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        style = "bold" if use.binds else "dim" if use.busy_s == 0 else "default"
        table.add_row(
            f"[{style}]{_shown(use.lane)}[/]",
            f"[{style}]{format_seconds(use.busy_s)}[/]",
            f"[{style}]{bar} {use.share:4.0%}[/]",
            "[bold]binds[/]" if use.binds else "",
        )
    return table


def conclusions(plan: Plan, smaller: SmallerBudget | None = None) -> list[RenderableType]:
    """Return which lane binds, where the wall is, and the next smaller budget, a line each."""
    sentences = [binding_sentence(plan), wall_sentence(plan)]
    if smaller is not None:
        sentences.append(printable(smaller.sentence(plan)))
    return [Text(sentence) for sentence in sentences]


def _table(
    *headers: str,
    right: tuple[int, ...] = (),
    whole: tuple[int, ...] = (0,),
    goes_first: tuple[str, ...] = (),
) -> FittingTable:
    """Return a table with these columns; those in ``whole`` never wrap."""
    table = FittingTable(goes_first=goes_first)
    for index, header in enumerate(headers):
        side: Literal["left", "right"] = "right" if index in right else "left"
        table.add_column(header, justify=side, no_wrap=index in whole)
    return table


def _tier(tier: str) -> str:
    style = {"device": "green", "host": "cyan", "disk": "magenta"}.get(tier)
    return f"[{style}]{tier}[/]" if style else tier


def _shown(name: str) -> str:
    return escape(printable(name))
