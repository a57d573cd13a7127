"""The table that `outcore bench train` fills while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.spinner import Spinner

from outcore.fitting_table import FittingTable
from outcore.units import format_rate

if TYPE_CHECKING:
    from outcore.bench.job import BenchResult, BenchRow

_FIGURES = ("TFLOPS", "tok/s", "step s", "device GiB", "host GiB")
_WORDS = ("optim. state", "fp32 master", "clip")


def ratio_to(row: BenchRow, rows: list[BenchRow]) -> float | None:
    """Return how many times as fast as ``row`` the first row, Outcore's, is."""
    from outcore.bench.job import BenchResult

    if not isinstance(row, BenchResult) or not isinstance(rows[0], BenchResult) or row is rows[0]:
        return None
    return row.step_s / rows[0].step_s


class BenchTable:
    """A row for each system: those that are done, the one that runs, those that wait."""

    def __init__(self, systems: list[str], rows: list[BenchRow]) -> None:
        """``rows`` is the caller's own list, which grows while the table is shown."""
        self._systems = systems
        self._rows = rows
        self._spinner = Spinner("dots", style="cyan")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from outcore.bench.job import BenchResult

        table = FittingTable(goes_first=("clip", "fp32 master", "optim. state", "host GiB"))
        table.add_column("system", no_wrap=True)
        for header in (*_FIGURES, *_WORDS, "ratio"):
            side: Literal["left", "right"] = "left" if header in _WORDS else "right"
            table.add_column(header, justify=side)
        for row in self._rows:
            if isinstance(row, BenchResult):
                ratio = ratio_to(row, self._rows)
                table.add_row(row.name, *_cells(row), "–" if ratio is None else f"{ratio:.2f}x")
            else:
                table.add_row(row.name, "[red]failed[/]")
        waiting = self._systems[len(self._rows) :]
        if waiting:
            table.add_row(waiting[0], self._spinner)
        for name in waiting[1:]:
            table.add_row(f"[dim]{name}[/]")
        yield ""
        yield table
        yield ""
        if len(self._systems) > 1:
            yield "[dim]ratio: how many times as fast as this system outcore is[/]"
        for row in self._rows:
            if not isinstance(row, BenchResult):
                yield f"[red]{escape(row.name)} failed:[/] {escape(row.failed)}"


def _cells(row: BenchResult) -> list[str]:
    return [
        f"{row.tflops:.0f}" if row.tflops >= 10 else f"{row.tflops:.3f}",
        format_rate(row.tokens_per_s),
        f"{row.step_s:.3f}",
        f"{row.device_peak_bytes / 2**30:.1f}" if row.device_peak_bytes else "–",
        f"{row.host_rss_bytes / 2**30:.1f}",
        escape(str(row.notes.get("optimizer_state", "?")).replace(",", "")),
        _yes_or_no(row.notes.get("fp32_master")),
        _yes_or_no(row.notes.get("clipping")),
    ]


def _yes_or_no(value: object) -> str:
    return "?" if value is None else "yes" if value else "no"
