"""The memory of each tier as a bar, stacked by purpose, against the budget.

Each part has a number that the table below the bar explains, so that colour is never needed.
"""

from __future__ import annotations

from outcore.planning.plan import Plan
from outcore.units import format_bytes
from outcore.views.page_style import NUM_COLOURS
from outcore.views.page_text import table, text
from outcore.views.words import TIERS, memory_sentence

_WIDE = 1000
_NUMBER_SHARE = 0.03  # of the bar: a part that is narrower gets no number


def memory_bars(plan: Plan, budgets: dict[str, int]) -> str:
    """Return a bar and its table for every tier that holds something."""
    tiers = [tier for tier in TIERS if plan.tier_bytes(tier) > 0]
    if not tiers:
        return '<p class="quiet">The plan names no bytes.</p>'
    return "".join(_tier(plan, tier, budgets.get(tier)) for tier in tiers)


def _tier(plan: Plan, tier: str, budget: int | None) -> str:
    purposes = sorted(plan.peak_bytes[tier].items(), key=lambda item: -item[1])
    used = plan.tier_bytes(tier)
    whole = max(used, budget or 0)
    sentence = memory_sentence(tier, used, budget)
    shapes, numbers, rows = [], [], []
    before = 0
    for index, (purpose, size) in enumerate(purposes):
        colour = f"k{index % NUM_COLOURS}"
        share = size / whole
        label = f"{index + 1}. {purpose}: {format_bytes(size)}"
        shapes.append(
            f'<rect class="{colour}" x="{_WIDE * before / whole:.3f}" y="0" '
            f'width="{_WIDE * share:.3f}" height="36"><title>{text(label)}</title></rect>'
        )
        if share >= _NUMBER_SHARE:
            middle = 100 * (before + size / 2) / whole
            numbers.append(
                f'<span class="number" aria-hidden="true" style="left:{middle:.2f}%">'
                f"{index + 1}</span>"
            )
        swatch = (
            f'<svg class="swatch" viewBox="0 0 1 1" aria-hidden="true">'
            f'<rect class="{colour}" width="1" height="1"/></svg>'
        )
        cells = [f"{swatch} {index + 1}", text(purpose), text(format_bytes(size))]
        rows.append([*cells, f"{size / budget:.1%}" if budget else ""])
        before += size
    if budget is not None and used > budget:
        shapes.append(
            f'<rect class="limit" x="{_WIDE * budget / whole:.3f}" y="0" width="3" height="36">'
            f"<title>{text(f'budget: {format_bytes(budget)}')}</title></rect>"
        )
    style = ' class="bad"' if budget is not None and used > budget else ""
    return (
        f'<div class="tier"><h3{style}>{text(sentence)}</h3>'
        f'<div class="bar" role="img" aria-label="{text(sentence)}">'
        f'<svg viewBox="0 0 {_WIDE} 36" preserveAspectRatio="none" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(shapes)}</svg>{"".join(numbers)}</div>'
        + table(
            f"{tier} memory by purpose",
            ["part", "purpose", "bytes", "of budget"],
            rows,
            numbers=(2, 3),
        )
        + "</div>"
    )
