"""`outcore plan` with the planner itself: docs/plan-command.md shows what is printed."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("machine", "option"), [("h200-pcie5", "--device-memory"), ("m4-max", "--host-memory")]
)
def test_more_memory_than_the_machine_has_is_refused(machine: str, option: str) -> None:
    command = ["plan", "qwen2.5-7b", "--machine", machine, option, "500GiB"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"is more than {machine} has" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("asked", "has"), [("25.5GiB", "23.5 GiB"), ("20GiB", "20.0 GiB")])
def test_a_plan_fills_no_more_than_the_card_has(asked: str, has: str, tmp_path: Path) -> None:
    """What a card is sold with may be asked for; it has a little less."""
    file = tmp_path / "plan.json"
    command = ["plan", "qwen2.5-7b", "--machine", "rtx-4090", "--device-memory", asked]
    result = CliRunner().invoke(app, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    answer = json.loads(file.read_text())
    used = sum(answer["plan"]["peak_bytes"]["device"].values())
    assert used <= answer["machine"]["device_memory_bytes"]
    assert f"% of {has}" in result.output


@pytest.mark.parametrize(
    ("machine", "state", "is_told"),
    [("cpu-laptop", "compact", True), ("cpu-laptop", "fp32", False), ("m4-max", "compact", False)],
)
def test_a_plan_in_bf16_on_a_cpu_says_what_its_figures_are(
    machine: str, state: str, is_told: bool
) -> None:
    command = ["plan", "smollm2-135m", "--machine", machine, "--state", state]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert ("predicted as fp32" in " ".join(result.output.split())) == is_told


def test_a_base_that_does_not_fit_is_told_of_fewer_bits() -> None:
    command = ["plan", "llama-3.1-70b", "--machine", "rtx-4090", "--lora", "16"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "; --frozen-weights int8; " in refused.stderr
    told = CliRunner().invoke(app, [*command, "--frozen-weights", "int8"])
    assert told.exit_code == 0, told.output


def test_a_machine_of_the_catalogue_can_have_more_host_memory_than_usual(tmp_path: Path) -> None:
    """The 14B shape in exact state does not fit a usual RTX 4090's 128 GiB."""
    command = ["plan", "qwen2.5-14b", "--machine", "rtx-4090", "--json", str(tmp_path / "p.json")]
    assert CliRunner().invoke(app, command).exit_code == 1
    result = CliRunner().invoke(app, [*command, "--host-memory", "256GiB"])
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "p.json").read_text())
    assert plan["machine"]["host_memory_bytes"] == 256 * 2**30
