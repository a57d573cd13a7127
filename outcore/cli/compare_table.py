"""The table of `outcore plan --compare`: offloading beside more GPUs, and the verdict."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from outcore.fitting_table import FittingTable
from outcore.planning.compare import (
    Comparison,
    Way,
    assumption_sentences,
    format_duration,
    format_tokens,
    verdict_sentences,
)
from outcore.units import format_rate


def comparison_report(comparison: Comparison) -> RenderableType:
    """Return the table, the verdict and the assumptions behind it."""
    table = FittingTable()
    table.add_column(f"{format_tokens(comparison.train_tokens)} tokens")
    for header in (f"{comparison.device}s", "tokens/s", "time", "money"):
        table.add_column(header, justify="right")
    table.add_row("offloading", *_cells(comparison.offload))
    if comparison.resident is None:
        table.add_row("without offloading", "none hold it")
    else:
        table.add_row("without offloading", *_cells(comparison.resident))
    return Group(
        table,
        "",
        *(Text(sentence, style="bold") for sentence in verdict_sentences(comparison)),
        *(Text(sentence, style="dim") for sentence in assumption_sentences(comparison)),
    )


def _cells(way: Way) -> tuple[str, str, str, str]:
    money = "–" if way.dollars is None else f"${way.dollars:,.{0 if way.dollars >= 100 else 2}f}"
    return str(way.num_gpus), format_rate(way.tokens_per_s), format_duration(way.seconds), money
