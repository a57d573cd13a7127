"""Standard output that cannot be written, or that nobody reads: a command ends, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outcore.planning.plan_json import read_plan

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "smollm2-135m", "--machine", "rtx-4090"]
VERIFY = ["verify", "{model}", "--steps", "1", "--seq-len", "8", "--device", "cpu"]
BENCH = ["bench", "train", "--shape", "{model}", "--sequences", "2", "--seq-len", "8"]
COMMANDS = [
    ["--help"],
    PLAN,
    [*PLAN, "--json", "-"],
    ["probe", "--list"],
    VERIFY,
    BENCH,
]


def run_outcore(
    arguments: list[str], model: Path, *, encoding: str = "utf-8", **streams: Any
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "outcore", *(a.format(model=model) for a in arguments)],
        stderr=subprocess.PIPE,
        encoding=encoding,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONIOENCODING": encoding},
        **streams,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line_and_status_2(command: list[str], tiny_model: Path) -> None:
    with open("/dev/full", "w") as full:
        process = run_outcore(command, tiny_model, stdout=full)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 2, told
    assert "Traceback" not in told
    assert told.splitlines()[-1].startswith(
        "error: standard output cannot be written: No space left on device."
    )
    assert "-" in command or len(told.splitlines()) == 1


@pytest.mark.parametrize("command", [["probe", "--list"], [*PLAN, "--json", "-"], VERIFY])
def test_a_reader_that_goes_away_is_told_nothing(command: list[str], tiny_model: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        process = run_outcore(command, tiny_model, stdout=nobody)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 1, told
    assert "Traceback" not in told
    assert "rror" not in told


def test_files_of_a_plan_whose_table_nobody_reads(tiny_model: Path, tmp_path: Path) -> None:
    """`outcore plan ... --json plan.json | head` leaves the plan that was asked for."""
    files = ["--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        process = run_outcore([*PLAN, *files], tiny_model, stdout=nobody)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 1, told
    assert read_plan(tmp_path / "plan.json").model == "smollm2-135m"
    assert (tmp_path / "plan.html").read_text().endswith("</html>\n")


def test_json_for_a_standard_output_that_is_closed(tiny_model: Path) -> None:
    process = run_outcore(
        ["probe", "--list", "--json", "-"], tiny_model, preexec_fn=lambda: os.close(1)
    )
    _, told = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "Traceback" not in told
    assert "closed; name a file" in told


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", [["probe", "--list"], PLAN])
def test_a_locale_that_lacks_characters_of_a_table(
    command: list[str], encoding: str, tiny_model: Path
) -> None:
    process = run_outcore(command, tiny_model, encoding=encoding, stdout=subprocess.PIPE)
    shown, told = process.communicate(timeout=100)
    assert process.returncode == 0, told
    assert "rtx-4090" in shown
