"""Line charts for the documentation: panels beside each other, as SVG that needs nothing else.

Values in, text out. Each drawing has a ground of its own, so that it reads on dark pages too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#4477aa", "#66a8cc", "#228833", "#b89b12", "#ee6677", "#aa3377")

_PANEL_WIDTH, _PANEL_HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44
_EDGE, _LEGEND_HEIGHT = 12, 34


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel; ``dots`` are points that were measured, where the line was not."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The values from the first to the last tick; ``ticks`` are (value, label)."""

    title: str
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where on the axis a value lies: 0 at the first tick, 1 at the last."""
        first, last = self.ticks[0][0], self.ticks[-1][0]
        if self.is_log:
            value, first, last = math.log(value), math.log(first), math.log(last)
        return (value - first) / (last - first)


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    marks: Sequence[float] = ()  # values of y that are drawn as dashed lines


def drawing(title: str, panels: Sequence[Panel], *, num_columns: int = 2) -> str:
    """Return the panels in rows, with one legend: lines of one name have one colour."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    apart = max(1, len(COLOURS) // len(names))
    colours = dict(zip(names, COLOURS[::apart], strict=False))
    num_rows = -(-len(panels) // num_columns)
    width = 2 * _EDGE + num_columns * _PANEL_WIDTH
    height = 2 * _EDGE + num_rows * _PANEL_HEIGHT + _LEGEND_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#334155">',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" fill="#f8fafc" '
        'stroke="#cbd5e1"/>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, num_columns)
        x, y = _EDGE + column * _PANEL_WIDTH, _EDGE + row * _PANEL_HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel, colours)}</g>')
    has_dots = any(line.dots for panel in panels for line in panel.lines)
    parts.append(_legend(colours, y=height - _EDGE - 8, has_dots=has_dots))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, colours: dict[str, str]) -> str:
    left, right = _LEFT, _PANEL_WIDTH - _RIGHT
    top, bottom = _TOP, _PANEL_HEIGHT - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = left + panel.x.share(point[0]) * (right - left)
        return x, bottom - panel.y.share(point[1]) * (bottom - top)

    parts = [f'<text x="{left}" y="20" font-weight="bold">{escape(panel.title)}</text>']
    first_x, first_y = panel.x.ticks[0][0], panel.y.ticks[0][0]
    for value, label in panel.y.ticks:
        y = place((first_x, value))[1]
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in panel.x.ticks:
        x = place((value, first_y))[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    middle = (left + right) / 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{escape(panel.x.title)}</text>'
        f'<text x="{right}" y="20" text-anchor="end" fill="#64748b">{escape(panel.y.title)}</text>'
    )
    for value in panel.marks:
        y = place((first_x, value))[1]
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#64748b" '
            'stroke-dasharray="4 4"/>'
        )
    for line in panel.lines:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line.points))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[line.name]}" '
            f'stroke-width="2" stroke-linejoin="round"><title>{escape(line.name)}</title>'
            "</polyline>"
        )
    for line in panel.lines:
        for x, y in map(place, line.dots):
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colours[line.name]}" '
                'stroke="#f8fafc" stroke-width="1.5"/>'
            )
    return "\n".join(parts)


def _legend(colours: dict[str, str], *, y: int, has_dots: bool) -> str:
    parts, x = [], _EDGE + _LEFT
    for name, colour in colours.items():
        parts.append(
            f'<line x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="3"/><text x="{x + 26}" y="{y}">{escape(name)}</text>'
        )
        x += 46 + 7 * len(name)
    if has_dots:
        parts.append(
            f'<circle cx="{x + 6}" cy="{y - 4}" r="4.5" fill="#334155"/>'
            f'<text x="{x + 16}" y="{y}">measured</text>'
        )
    return "\n".join(parts)
