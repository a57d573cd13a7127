"""The table that `outcore verify` fills while it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.spinner import Spinner

from outcore.fitting_table import FittingTable
from outcore.planning.compare import format_duration

if TYPE_CHECKING:
    from outcore.verify import Comparison, PlainTorchComparison, TrainedRun

Row = tuple[str, str, str, str]  # losses, weights and moments, seconds, verdict
_RESIDENT = "resident"
_PLAIN = "plain Hugging Face + torch"
_TRAININGS_OF_PLAIN = 3  # torch twice, for its own rounding, and Outcore
_MOST_NAMED = 8


class VerifyTable:
    """A row for each placement: those that are done, the one that runs, those that wait."""

    def __init__(self, placements: list[str]) -> None:
        self._names = [_RESIDENT, *placements, _PLAIN]
        self._rows: list[Row] = []
        self._spinner = Spinner("dots", style="cyan")
        self._differing: list[Comparison] = []
        self._plain: PlainTorchComparison | None = None
        self._started_s = self._last_row_s = time.monotonic()

    @property
    def has_passed(self) -> bool:
        return not self._differing and self._plain is not None and self._plain.is_close

    @property
    def progress(self) -> str:
        """How many of all runs are done."""
        return f"{len(self._rows)} of {len(self._names)}"

    def resident_done(self, run: TrainedRun) -> None:
        num_tensors = len(run.digests)
        self._add(
            (f"{len(run.losses)}", f"{num_tensors}", f"{run.seconds:.1f}", "[dim]reference[/]")
        )

    def placement_done(self, comparison: Comparison) -> None:
        num_equal = comparison.num_tensors - len(comparison.differing)
        verdict = "[green]same bits[/]" if comparison.is_exact else "[bold red]differs[/]"
        if not comparison.is_exact:
            self._differing.append(comparison)
        self._add(
            (
                "equal" if comparison.losses_equal else "[red]differ[/]",
                f"{num_equal} of {comparison.num_tensors}",
                f"{comparison.seconds:.1f}",
                verdict,
            )
        )

    def plain_torch_done(self, plain: PlainTorchComparison) -> None:
        self._plain = plain
        verdict = "[green]agrees[/]" if plain.is_close else "[bold red]too far[/]"
        num_close = len(plain.differences) - len(plain.too_far)
        self._add(
            ("–", f"{num_close} of {len(plain.differences)}", f"{plain.seconds:.1f}", verdict)
        )

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        self._last_row_s = time.monotonic()

    def _still_to_do(self) -> str:
        """Which run this is, and how long all that are left take if they are like those before."""
        num_done, num_runs = len(self._rows), len(self._names)
        text = f"run {num_done + 1} of {num_runs}"
        if num_done == 0:
            return text
        mean_s = (self._last_row_s - self._started_s) / num_done
        num_left = num_runs - num_done - 1 + _TRAININGS_OF_PLAIN
        left_s = num_left * mean_s - (time.monotonic() - self._last_row_s)
        return f"{text}, about {format_duration(left_s)} left" if left_s >= 1 else text

    def explanation(self) -> str:
        """What the rows mean: a verdict, or what differs."""
        lines = [line for comparison in self._differing for line in _what_differs(comparison)]
        if self._plain is not None:
            lines += _how_far(self._plain)
        if self.has_passed:
            lines.append("[bold green]Every placement trains this model to the same bits here.[/]")
        else:
            lines.append("[bold red]Not the same: see above.[/]")
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = FittingTable(goes_first=("losses", "seconds"))
        table.add_column("placement", no_wrap=True)
        table.add_column("losses", justify="right")
        table.add_column("tensors equal", justify="right")
        table.add_column("seconds", justify="right")
        table.add_column("verdict", no_wrap=True, min_width=9)
        for name, row in zip(self._names, self._rows, strict=False):
            table.add_row(escape(name), *row, end_section=name == _RESIDENT)
        waiting = self._names[len(self._rows) :]
        if waiting:
            table.add_row(waiting[0], "", "", "", self._spinner)
        for name in waiting[1:]:
            table.add_row(f"[dim]{escape(name)}[/]", "", "", "", "")
        yield ""
        yield table
        yield f"[dim]{self._still_to_do()}[/]" if waiting and console.is_terminal else ""


def _what_differs(comparison: Comparison) -> list[str]:
    lines = [f"[red]{escape(comparison.name)}[/] differs from the resident run"]
    if not comparison.losses_equal:
        lines.append("  in its losses")
    lines += [f"  in {escape(name)}" for name in comparison.differing[:_MOST_NAMED]]
    if len(comparison.differing) > _MOST_NAMED:
        lines.append(f"  and {len(comparison.differing) - _MOST_NAMED} more tensors")
    return lines


def _how_far(plain: PlainTorchComparison) -> list[str]:
    name, worst = plain.worst
    lines = [
        f"From plain Hugging Face + torch.optim.AdamW in fp32: at most {worst:.1e}, relative, in "
        f"{escape(name) or 'no parameter'}."
    ]
    if plain.noise:
        lines.append(
            f"[dim]{len(plain.noise)} parameters, such as {escape(next(iter(plain.noise)))}, have "
            "gradients of rounding noise: there torch is as far from itself.[/]"
        )
    lines += [
        f"  [red]{escape(far)}[/] is {plain.differences[far]:.1e} away"
        for far in plain.too_far[:_MOST_NAMED]
    ]
    return lines
