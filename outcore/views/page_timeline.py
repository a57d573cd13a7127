"""The timeline of a step as SVG: a row for each lane, a rectangle for each piece of work.

Rows are labelled and pieces are named where the pointer is, so that colour is never needed. Only
the horizontal direction scales; texts are HTML above the picture and keep their shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.planning.plan import LANES, Span
from outcore.views.page_style import NUM_COLOURS
from outcore.views.page_text import text
from outcore.views.side_by_side import busy_s
from outcore.views.trace import from_zero, lanes_of

WIDE = 10_000  # units of the picture from start to end
ROW = 34
MOST_PIECES = 4000
NUM_TICKS = 6
MOST_MARKS = 60
_MARK_SHARE = 1 / 16  # of the picture: a phase that is narrower gets no label


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is drawn: a span, or several neighbours that would be too narrow to see."""

    start_s: float
    end_s: float
    first: str
    last: str
    count: int = 1


def pieces_of(spans: Sequence[Span], total_s: float, most: int = MOST_PIECES) -> list[Piece]:
    """Return one lane's pieces in order; at most about ``most``, by joining the narrowest."""
    pieces: list[Piece] = []
    narrow_s = total_s / most if len(spans) > most else 0.0
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        last = pieces[-1] if pieces else None
        if last is not None and narrow_s and max(span.end_s, last.end_s) - last.start_s < narrow_s:
            pieces[-1] = Piece(
                start_s=last.start_s,
                end_s=max(span.end_s, last.end_s),
                first=last.first,
                last=span.name,
                count=last.count + 1,
            )
        else:
            pieces.append(
                Piece(start_s=span.start_s, end_s=span.end_s, first=span.name, last=span.name)
            )
    return pieces


def end_s(spans: Sequence[Span]) -> float:
    """Return when the last span ends, counted from the first one's start."""
    return max((span.end_s for span in from_zero(spans)), default=0.0)


def timeline(title: str, spans: Sequence[Span], step_s: float, total_s: float) -> str:
    """Return the lanes of a step of ``step_s`` against time, ``total_s`` wide."""
    if not spans or step_s <= 0:
        return f'<p class="quiet">{text(title)}: no timeline was recorded.</p>'
    moved = from_zero(spans)
    lanes = lanes_of(moved)
    busy = busy_s(moved)
    names, shapes, marks = [], [], []
    for row, lane in enumerate(lanes):
        pieces = pieces_of([span for span in moved if span.lane == lane], total_s)
        share = busy[lane] / step_s
        names.append(f"<div>{text(lane)}<br><span>{share:.0%} busy</span></div>")
        shapes.append(
            f'<rect class="rule" x="0" y="{row * ROW + ROW - 1}" width="{WIDE}" height="1"/>'
        )
        shapes += _shapes(pieces, lane, row, total_s)
        marks += _marks(pieces, row, total_s)
    height = len(lanes) * ROW
    described = "; ".join(f"{lane} is busy {busy[lane]:.2f} s" for lane in lanes)
    ticks = "".join(
        f'<span style="left:{100 * i / (NUM_TICKS - 1):g}%">'
        f"{total_s * i / (NUM_TICKS - 1):.2f} s</span>"
        for i in range(NUM_TICKS)
    )
    return (
        f'<div class="timeline"><h3>{text(title)}</h3><div class="rows">'
        f'<div class="names">{"".join(names)}</div>'
        f'<div class="plot" tabindex="0" role="group" style="height:{height}px" '
        f'data-total-seconds="{total_s!r}" aria-label="{text(title)} timeline; + and − zoom">'
        f'<svg viewBox="0 0 {WIDE} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(f"{title}, {step_s:.2f} s: {described}")}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(shapes)}</svg>{"".join(marks)}</div>'
        f'<div></div><div class="axis" aria-hidden="true">{ticks}</div></div></div>'
    )


def _shapes(pieces: Sequence[Piece], lane: str, row: int, total_s: float) -> list[str]:
    colour = LANES.index(lane) if lane in LANES else NUM_COLOURS - 1
    shapes = []
    for index, piece in enumerate(pieces):
        # Neighbours differ in strength, so that where one ends and the next begins can be seen.
        kind = f"k{colour} odd" if index % 2 else f"k{colour}"
        x = WIDE * piece.start_s / total_s
        width = WIDE * (piece.end_s - piece.start_s) / total_s
        shapes.append(
            f'<rect class="{kind}" x="{x:.2f}" y="{row * ROW + 4}" width="{max(width, 0.5):.2f}" '
            f'height="{ROW - 9}"><title>{text(_title(piece, lane))}</title></rect>'
        )
    return shapes


def _title(piece: Piece, lane: str) -> str:
    name = piece.first
    if piece.count > 1:
        name = f"{piece.count} pieces, {piece.first} to {piece.last}"
    took_ms = (piece.end_s - piece.start_s) * 1e3
    return f"{lane}: {name}, {piece.start_s:.4f} to {piece.end_s:.4f} s ({took_ms:.2f} ms)"


def _marks(pieces: Sequence[Piece], row: int, total_s: float) -> list[str]:
    """Return labels for stretches of work of one kind, such as a lane's forward."""
    stretches: list[tuple[str, float, float]] = []
    for piece in pieces:
        kind = (piece.first.split() or [""])[0]
        if stretches and stretches[-1][0] == kind:
            stretches[-1] = (kind, stretches[-1][1], piece.end_s)
        else:
            stretches.append((kind, piece.start_s, piece.end_s))
    marks: list[str] = []
    for kind, start, end in stretches:
        if kind and end - start >= _MARK_SHARE * total_s and len(marks) < MOST_MARKS:
            left = 50 * (start + end) / total_s
            marks.append(
                f'<span class="mark" aria-hidden="true" style="top:{row * ROW + 8}px;'
                f'left:{left:.2f}%" data-from="{WIDE * start / total_s:.1f}" '
                f'data-to="{WIDE * end / total_s:.1f}">{text(kind[:24])}</span>'
            )
    return marks
