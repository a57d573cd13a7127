"""Where a command's output goes: the table for people, `--json` for programs.

With `--json -` standard output is the JSON and nothing else; the table moves to standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape


def console_for(json_file: str | None) -> Console:
    """Return the console of the table, after checking that the JSON can be written later."""
    if json_file == "-":
        return Console(stderr=True, highlight=False)
    if json_file is not None:
        folder = Path(json_file).absolute().parent
        if not folder.is_dir():
            raise typer.BadParameter(f"{folder} is no directory", param_hint="--json")
        if Path(json_file).is_dir():
            raise typer.BadParameter(f"{json_file} is a directory", param_hint="--json")
    return Console(highlight=False)


def write_json(report: dict[str, Any], json_file: str | None) -> None:
    """Write the report to the file, or to standard output for "-"; None writes nothing."""
    text = json.dumps(report, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file is not None:
        Path(json_file).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def shown_while_filled(table: RenderableType, console: Console) -> Iterator[None]:
    """Show the table and keep it up to date; where nobody watches, print it once it is full."""
    if console.is_terminal:
        with Live(table, console=console, refresh_per_second=8):
            yield
        return
    try:
        yield
    finally:
        console.print(table)


def stop(message: str) -> NoReturn:
    """End the command with a message: something here, not the result, is in the way."""
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(message)}")
    raise typer.Exit(2)
