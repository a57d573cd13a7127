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
    check_file(json_file, "--json")
    return Console(highlight=False)


def check_file(file: str | None, option: str) -> None:
    """Refuse a place that cannot be written before any time is spent."""
    if file is None:
        return
    if not file.strip():
        raise typer.BadParameter("an empty name; name a file", param_hint=option)
    if file == "-":
        raise typer.BadParameter("name a file", param_hint=option)
    path = Path(file).absolute()
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no directory", param_hint=option)
    if path.is_dir():
        raise typer.BadParameter(f"{file} is a directory", param_hint=option)
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return  # a pipe: whoever reads it would see its end
    try:
        path.open("a").close()  # permissions alone do not tell: some file systems take no files
        if is_new:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(
            f"{file} cannot be written: {error.strerror}", param_hint=option
        ) from None


def write_json(report: dict[str, Any], json_file: str | None) -> None:
    """Write the report to the file, or to standard output for "-"; None writes nothing."""
    text = json.dumps(report, indent=2) + "\n"
    if json_file == "-":
        if sys.stdout is None:
            stop("--json - writes to standard output, which is closed; name a file")
        sys.stdout.write(text)
    elif json_file is not None:
        write_text(text, json_file)


def write_text(text: str, file: str) -> None:
    """Write a file that was checked before; a disk may be full by now."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        stop(f"{file} cannot be written: {error.strerror}")


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
    say_error(message)
    raise typer.Exit(2)


def say_error(message: str) -> None:
    """Say what is wrong, where neither tables nor JSON go."""
    console = Console(stderr=True, highlight=False)
    # Where nobody watches, what is one line stays one: for grep, and for logs.
    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=not console.is_terminal)
