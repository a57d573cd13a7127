"""`outcore plan` with the planner itself: docs/plan-command.md shows what is printed."""

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


@pytest.mark.parametrize("option", ["--device-memory", "--host-memory"])
def test_more_memory_than_the_machine_has_is_refused(option: str) -> None:
    command = ["plan", "qwen2.5-7b", "--machine", "h200-pcie5", option, "500GiB"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "is more than h200-pcie5 has" in " ".join(result.output.replace("│", " ").split())
