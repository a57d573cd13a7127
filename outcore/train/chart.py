"""A line chart as inline SVG: figures over steps, readable without a script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from outcore.views.page_text import text

_WIDTH, _HEIGHT = 1000, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_MOST_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line; ``points`` are (step, value). It is not drawn across the steps in ``breaks``."""

    name: str
    points: Sequence[tuple[float, float]]
    breaks: Sequence[float] = ()  # where what follows cannot be compared with what was before

    @property
    def parts(self) -> list[list[tuple[float, float]]]:
        edges = [-math.inf, *self.breaks, math.inf]
        pairs = itertools.pairwise(edges)
        return [[p for p in self.points if start <= p[0] < end] for start, end in pairs]


def line_chart(title: str, series: Sequence[Series], *, unit: str = "") -> str:
    """Return a chart with axes from the least to the largest value, or a sentence if empty."""
    thinned = [(s.name, [_thinned(part) for part in s.parts]) for s in series]
    drawn = [(name, [line for line in lines if line]) for name, lines in thinned if any(lines)]
    if not drawn:
        return '<p class="quiet">Nothing was measured.</p>'
    xs = [x for _, lines in drawn for line in lines for x, _ in line]
    ys = [y for _, lines in drawn for line in lines for _, y in line]
    x_range, y_range = _padded(min(xs), max(xs)), _padded(min(ys), max(ys))
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(title)}" '
        'width="100%" class="chart">'
    ]
    for value in _ticks(*y_range):
        y = _place(value, y_range, _HEIGHT - _BOTTOM, _TOP)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text(_label(value))}</text>'
        )
    for value in _ticks(*x_range):
        x = _place(value, x_range, _LEFT, _WIDTH - _RIGHT)
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{text(_label(value))}</text>'
        )
    for number, (name, lines) in enumerate(drawn):
        for line in lines:
            places = " ".join(
                f"{_place(x, x_range, _LEFT, _WIDTH - _RIGHT):.1f},"
                f"{_place(y, y_range, _HEIGHT - _BOTTOM, _TOP):.1f}"
                for x, y in line
            )
            parts.append(
                f'<polyline points="{places}" class="line s{number}"><title>{text(name)}</title>'
                "</polyline>"
            )
            if len(line) <= 30:  # a few points are seen as such
                parts += [
                    f'<circle cx="{place.split(",")[0]}" cy="{place.split(",")[1]}" r="3" '
                    f'class="k{number}"/>'
                    for place in places.split()
                ]
    parts.append("</svg>")
    legend = " ".join(
        f'<svg width="12" height="12" class="swatch series" aria-hidden="true"><rect width="12" '
        f'height="12" class="k{number}"/></svg> {text(name)}'
        for number, (name, _) in enumerate(drawn)
    )
    last = ", ".join(f"{name} {_label(lines[-1][-1][1])}{unit}" for name, lines in drawn)
    return f'{"".join(parts)}<p class="quiet">{legend}. Last: {text(last)}</p>'


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most so many points as can be told apart, each the mean of those it stands for."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    size = max(1, -(-len(finite) // _MOST_POINTS))
    groups = [finite[i : i + size] for i in range(0, len(finite), size)]
    return [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]


def _padded(least: float, most: float) -> tuple[float, float]:
    if least == most:
        return least - (abs(least) or 1) / 2, most + (abs(most) or 1) / 2
    return least, most


def _place(value: float, among: tuple[float, float], start: float, end: float) -> float:
    return start + (value - among[0]) / (among[1] - among[0]) * (end - start)


def _ticks(least: float, most: float) -> list[float]:
    """Return round values in between, about five."""
    raw = (most - least) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(least / step)
    return [n * step for n in range(first, math.floor(most / step) + 1)]


def _label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
