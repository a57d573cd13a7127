"""Tables in narrow terminals: no figure is cut, and what is left out is named."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from outcore.fitting_table import FittingTable


def shown(table: RenderableType, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def make_table() -> FittingTable:
    table = FittingTable(goes_first=("third", "a fourth"))
    table.add_column("name", no_wrap=True)
    for header in ("second one", "third", "a fourth"):
        table.add_column(header, justify="right")
    table.add_row("two words", "12,345", "300.5 GiB", "4")
    return table


def test_with_room_for_all_nothing_changes() -> None:
    assert shown(make_table(), 80) == [
        "name        second one       third   a fourth",
        "─────────────────────────────────────────────",
        "two words       12,345   300.5 GiB          4",
    ]


def test_columns_move_together_before_words_wrap() -> None:
    assert shown(make_table(), 42) == [
        "name       second one      third  a fourth",
        "──────────────────────────────────────────",
        "two words      12,345  300.5 GiB         4",
    ]


def test_words_wrap_before_a_column_goes() -> None:
    assert shown(make_table(), 32) == [
        "           second              a",
        "name          one  third  fourth",
        "────────────────────────────────",
        "two words  12,345  300.5       4",
        "                     GiB",
    ]


@pytest.mark.parametrize(
    ("width", "left_out"), [(31, ["third"]), (25, ["third"]), (24, ["third", "a fourth"])]
)
def test_columns_go_in_the_order_given_and_are_named(width: int, left_out: list[str]) -> None:
    lines = shown(make_table(), width)
    assert "12,345" in "".join(lines)
    assert "300.5" not in "".join(lines)
    assert " ".join(lines[-2:]).endswith(f"too narrow for: {', '.join(left_out)}")


def test_where_nothing_fits_all_cells_stand_beneath_each_other() -> None:
    assert shown(make_table(), 15) == [
        "name:",
        "two words",
        "  second one:",
        "  12,345",
        "  third: 300.5",
        "  GiB",
        "  a fourth: 4",
    ]


def test_what_has_no_name_or_no_cell_leaves_no_line() -> None:
    table = FittingTable()
    for header in ("", "figure", "remark"):
        table.add_column(header)
    table.add_row("a long name", "12,345.6", "[dim][/]")
    assert shown(table, 15) == ["a long name", "  figure:", "  12,345.6"]


def test_a_table_that_was_shown_narrow_is_whole_again_when_wide() -> None:
    table = make_table()
    shown(table, 24)
    assert shown(table, 80) == shown(make_table(), 80)
