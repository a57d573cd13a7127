"""Figures that were measured, beside what a build is held to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, script

TABLE = script("bars_table")
MEASURED = {
    "probe-all.json": "plans-one-probe-probe",
    "plans-all.json": "plans-one-probe",
    "plans-disk.json": "plans-aside",  # of another machine: its rows stand for the older ones
    "lora-72b.json": "lora-72b-one-probe",
    "train-command.json": "train-command-one-probe",
    "loading-7b.json": "loading-7b",
    "checkpoint.json": "checkpoint",
    "verify-1b-all.json": "verify-1b",
    "smollm2.json": "smollm2",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, result in MEASURED.items():
        shutil.copy(BENCHMARKS / "results" / f"2026-11-18-h200-{result}.json", tmp_path / name)
    return tmp_path


def _changed(path: Path, change: Callable[[Any], None]) -> None:
    figures = json.loads(path.read_text())
    change(figures)
    path.write_text(json.dumps(figures))


def _row(setting: str, **values: Any) -> Callable[[Any], None]:
    def change(figures: Any) -> None:
        next(r for r in figures["rows"] if r["setting"] == setting).update(values)

    return change


def _placement(figures: Any) -> None:
    figures["placements"][5]["is_exact"] = False


def _left_out(figures: Any) -> None:
    del figures["placements"][5]


def _prediction(figures: Any) -> None:
    figures["prediction"]["step"]["predicted"] *= 0.9


def test_all_are_held_by_what_was_measured(folder: Path) -> None:
    bars = list(TABLE.all_bars(folder))
    assert not [bar for bar in bars if bar.is_held is False]
    held = {bar.name: bar.measured for bar in bars if bar.is_held}
    assert held["7b"] == "563.2 TFLOPS"
    assert held["7b over native PyTorch"] == "1.65x"
    assert held["settings with a prediction"] == "8"
    assert held["8b-long-clip, one sequence"] == "73,728 tokens"
    assert held["3b-disk-wait, of the disk just before"] == "90.6%"
    assert held["72b-minimal-clip: step predicted"] == "-8.6%"
    assert held["gemma-3-1b: placements with the same bits"] == "14 of 14"
    assert held["the first step after loading"] == "18.8 s"


def test_too_few_predictions_are_not_called_enough(folder: Path) -> None:
    (folder / "lora-72b.json").unlink()
    told = {bar.name: bar for bar in TABLE.all_bars(folder)}["settings with a prediction"]
    assert (told.measured, told.bar, told.is_held) == ("7", "at least 8", None)


@pytest.mark.parametrize(
    ("file", "change", "name"),
    [
        ("plans-all.json", _row("7b", tflops=499.9), "7b"),
        ("plans-all.json", _row("7b-native", tflops=600.0), "7b over native PyTorch"),
        ("plans-all.json", _row("14b", failed="out of memory"), "14b"),
        ("plans-disk.json", _row("72b-minimal-clip", all_step_s=[69.0]), "72b-minimal-clip"),
        (
            "plans-disk.json",
            lambda figures: figures["rows"][0].update(step_s=16.2),
            "3b-disk-wait, of the disk just before",
        ),
        ("lora-72b.json", _prediction, "lora-72b: step predicted"),
        ("verify-1b-all.json", _placement, "gemma-3-1b: placements with the same bits"),
        ("verify-1b-all.json", _left_out, "gemma-3-1b: placements with the same bits"),
        (
            "train-command.json",
            lambda figures: figures["train"].update(load_s=5.6),
            "outcore train loads, of the probe's disk",
        ),
        (
            "smollm2.json",
            lambda figures: figures["plain"].update(exact_match=0.99),
            "SmolLM2, from 0.0% to 100.0%, plain 99.0%",
        ),
    ],
)
def test_what_is_missed_is_said(
    folder: Path, file: str, change: Callable[[Any], None], name: str, monkeypatch: Any, capsys: Any
) -> None:
    _changed(folder / file, change)
    monkeypatch.setattr("sys.argv", ["bars_table.py", str(folder)])
    with pytest.raises(SystemExit) as ended:
        TABLE.main()
    assert ended.value.code == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("MISSED")]
    assert len(missed) == 1
    assert missed[0].startswith(f"{name} ")


def test_rows_that_are_not_there_are_named(folder: Path) -> None:
    """plans.py may end before it has written any, where other files have some."""
    _changed(folder / "plans-all.json", lambda figures: figures.update(rows=figures["rows"][:1]))
    unmeasured = {bar.name for bar in TABLE.all_bars(folder) if bar.measured == "not measured"}
    assert unmeasured == {"14b", "32b-compact", "7b", "7b-native", "8b-long-clip"}


def test_a_file_that_a_failure_left_empty_hides_no_other_figure(folder: Path) -> None:
    names = {bar.name for bar in TABLE.all_bars(folder)}
    (folder / "checkpoint.json").write_text("")  # what the shell makes before the script runs
    bars = list(TABLE.all_bars(folder))
    (lost,) = {bar.name for bar in bars} - names
    assert lost == "checkpoints"
    assert next(bar for bar in bars if bar.name == lost).is_held is False
    assert len(bars) == len(names)


def test_what_was_not_measured_is_no_bar_that_is_held(tmp_path: Path) -> None:
    bars = list(TABLE.all_bars(tmp_path))
    assert {bar.measured for bar in bars} == {"not measured"}
    assert not [bar for bar in bars if bar.is_held is not None]
