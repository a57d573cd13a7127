"""Pieces of HTML in which every text from a plan is escaped: the only way onto the page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from outcore.views.words import printable


def text(value: object) -> str:
    """Return a value as text for HTML, between tags or in a quoted attribute."""
    return html.escape(printable(str(value)), quote=True)


def table(
    caption: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    emphasised: Sequence[int] = (),
) -> str:
    """Return a table; cells are HTML already. ``numbers``: columns that align to the right."""

    def aligned(column: int) -> str:
        return ' class="n"' if column in numbers else ""

    head = "".join(
        f'<th scope="col"{aligned(column)}>{text(header)}</th>'
        for column, header in enumerate(headers)
    )
    body = []
    for index, row in enumerate(rows):
        cells = f'<th scope="row">{row[0]}</th>' + "".join(
            f"<td{aligned(column)}>{cell}</td>" for column, cell in enumerate(row[1:], start=1)
        )
        opening = '<tr class="binds">' if index in emphasised else "<tr>"
        body.append(f"{opening}{cells}</tr>")
    return (
        f'<div class="scroll"><table aria-label="{text(caption)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
