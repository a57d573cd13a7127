"""docs/plan-command.md shows what the commands in it print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outcore.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "plan-command.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)\n```", PAGE, re.DOTALL)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("option", ["--device-memory", "--compare"])
def test_the_page_shows_what_is_printed(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    command = next(i for i, block in enumerate(BLOCKS) if option in block)
    result = CliRunner().invoke(app, BLOCKS[command].split()[1:])
    assert result.exit_code == 0, result.output
    shown = lines_of(BLOCKS[command + 1])
    assert lines_of(result.output)[-len(shown) :] == shown
