"""Tables that stay readable in a narrow terminal.

Cells wrap between words, never inside a figure; where that does not suffice, whole columns are left
out, the least important first, and named beneath the table. Where not even the others fit, all
cells of a row stand beneath each other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

_MOST_COLUMNS = 1000  # for measuring cells: as wide as they like


class FittingTable(Table):
    """A table that fits itself to the terminal."""

    def __init__(self, *, goes_first: Sequence[str] = (), show_header: bool = True) -> None:
        """``goes_first``: headers of columns that may be left out, in this order."""
        super().__init__(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=show_header
        )
        self._goes_first = goes_first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out: list[str] = []
        for header in (None, *self._goes_first):
            if header is not None:
                left_out.append(header)
            kept = [column for column in self.columns if column.header not in left_out]
            shown = self._fitted(kept, console, options)
            if shown is not None:
                break
        if shown is None:
            yield from self._rows_in_lines(console)
            return
        yield from Table.__rich_console__(shown, console, options)
        if left_out:
            yield f"[dim]too narrow for: {', '.join(left_out)}[/]"

    def _rows_in_lines(self, console: Console) -> Iterator[RenderableType]:
        """Yield the first header once, and then of each row the first cell, and beneath it the
        others with their headers.
        """
        if self.columns[0].header and self.show_header:
            yield Text(f"{self.columns[0].header}:", style="table.header")
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            for index, (column, cell) in enumerate(zip(self.columns, cells, strict=True)):
                shown = console.render_str(cell) if isinstance(cell, str) else cell
                if not shown:
                    continue
                if index and column.header and self.show_header and isinstance(shown, Text):
                    shown = Text.assemble(f"{column.header}: ", shown)
                yield Padding(shown, (0, 0, 0, 2 if index else 0), expand=False)

    def _fitted(
        self, columns: list[Column], console: Console, options: ConsoleOptions
    ) -> FittingTable | None:
        """Return a table of these columns that fits; None where they need more room."""
        wide = options.update(max_width=_MOST_COLUMNS, no_wrap=False)
        ranges = [_width_range(column, console, wide) for column in columns]
        num_gaps = len(columns) - 1
        # Three characters between columns; two where the cells would have to wrap otherwise.
        is_close = sum(most for _, most in ranges) + 3 * num_gaps > options.max_width
        widths = _widths(ranges, options.max_width - (2 if is_close else 3) * num_gaps)
        if widths is None:
            return None
        shown = copy.copy(self)
        shown.collapse_padding = is_close
        shown.columns = [
            replace(column, _index=index, width=width)
            for index, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        return shown


def _width_range(column: Column, console: Console, wide: ConsoleOptions) -> tuple[int, int]:
    """Return the least width, which splits no word, and the width of the longest line."""
    found = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
    most = max(column.min_width or 1, *(measured.maximum for measured in found))
    least = max(column.min_width or 1, *(measured.minimum for measured in found))
    return (most if column.no_wrap else least), most


def _widths(ranges: list[tuple[int, int]], room: int) -> list[int] | None:
    """Return the widths of columns, the widest made narrower first; None without room for them."""
    widths = [most for _, most in ranges]
    while sum(widths) > room:
        reducible = [i for i, (least, _) in enumerate(ranges) if widths[i] > least]
        if not reducible:
            return None
        widths[max(reducible, key=lambda i: widths[i])] -= 1
    return widths
