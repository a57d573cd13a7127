"""Figures of a run: lines of JSON, and what TensorBoard reads back of the same."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path

import pytest

from outcore.train.metrics import Metrics, read_metrics


def board_of(output: Path) -> dict[str, list[tuple[int, float]]]:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    board = event_accumulator.EventAccumulator(str(output / "tensorboard"))
    board.Reload()
    return {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }


def test_tensorboard_has_the_figures_of_the_lines(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    metrics = Metrics(tmp_path, first_step=1, tensorboard=None)
    for step in (1, 2, 3):
        metrics.add("train", step, loss=4.0 / step, tokens_per_s=1000.0)
    metrics.add("eval", 3, "0a1b2c3d", loss=2.5)
    metrics.close()
    assert board_of(tmp_path) == {
        "train/loss": [(1, 4.0), (2, 2.0), (3, pytest.approx(4 / 3))],
        "train/tokens_per_s": [(1, 1000.0), (2, 1000.0), (3, 1000.0)],
        "eval/loss": [(3, 2.5)],
    }


def test_a_resumed_run_takes_back_what_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first_step, loss in ((1, 9.0), (3, 5.0)):
        metrics = Metrics(tmp_path, first_step=first_step, tensorboard=True)
        for step in range(first_step, 5):
            metrics.add("train", step, loss=loss)
        metrics.close()
    expected = [(1, 9.0), (2, 9.0), (3, 5.0), (4, 5.0)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
    assert board_of(tmp_path)["train/loss"] == expected


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, first_step=1, tensorboard=False)
    metrics.add("train", 1, loss=math.nan, norm=math.inf, lr=0.5)
    metrics.close()
    assert read_metrics(tmp_path) == [
        {"kind": "train", "step": 1, "loss": None, "norm": None, "lr": 0.5}
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    told: list[str] = []
    metrics = Metrics(tmp_path, first_step=1, tensorboard=False)
    metrics.add("train", 1, loss=1.0)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    metrics = Metrics(tmp_path, first_step=2, tensorboard=False, tell=told.append)
    metrics.add("train", 2, loss=2.0)
    metrics.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert told == []


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it fails
    with pytest.raises(ValueError, match="pip install tensorboard"):
        Metrics(tmp_path, first_step=1, tensorboard=True)


def test_a_board_that_fails_is_told_and_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = pytest.importorskip("tensorboard.summary.writer.record_writer")
    told: list[str] = []
    printed: list[str] = []

    def print_traceback(failed: threading.ExceptHookArgs) -> None:
        printed.append(str(failed.exc_value))

    def fail(*_: object) -> None:
        raise OSError("full")

    def fail_otherwise() -> None:
        raise ValueError("somebody else's")

    monkeypatch.setattr(threading, "excepthook", print_traceback)
    metrics = Metrics(tmp_path, first_step=1, tensorboard=True, tell=told.append)
    monkeypatch.setattr(records.RecordWriter, "write", fail)
    metrics.add("train", 1, loss=1.0)
    other = threading.Thread(target=fail_otherwise)
    other.start()
    other.join()
    metrics.close()
    assert told == ["TensorBoard gets no more figures of this run: full"]
    assert printed == ["somebody else's"]
    assert threading.excepthook is print_traceback


@pytest.mark.parametrize("bad", ['{"kind": "tra', '{"loss": 1.0}', "[1]", "\0\0\0"])
def test_a_line_that_is_damaged_costs_none_behind_it(tmp_path: Path, bad: str) -> None:
    told: list[str] = []
    metrics = Metrics(tmp_path, first_step=1, tensorboard=False)
    for step in (1, 2, 3):
        metrics.add("train", step, loss=1.0)
    metrics.close()
    path = tmp_path / "metrics.jsonl"
    first, _, third = path.read_text().splitlines()
    path.write_text("\n".join([first, bad, third, '{"kind": "train", "st']))
    metrics = Metrics(tmp_path, first_step=4, tensorboard=False, tell=told.append)
    metrics.close()
    assert path.read_text().splitlines() == [first, third]
    assert told == [f"{path}: lines that are damaged, or not of a run, are left out: 1"]


@pytest.mark.parametrize("held_out", ["0a1b2c3d", "4e5f6071"])
def test_tensorboard_has_the_last_evaluation_once(tmp_path: Path, held_out: str) -> None:
    pytest.importorskip("tensorboard")
    for first_step, data in ((1, "0a1b2c3d"), (3, held_out)):
        is_again = first_step == 3
        metrics = Metrics(
            tmp_path, first_step=first_step, tensorboard=True, evaluates_again=is_again
        )
        for step in range(first_step, 3):
            metrics.add("train", step, loss=1.0)
        metrics.add("eval", 2, data, loss=3.0)
        metrics.close()
    assert [line["kind"] for line in read_metrics(tmp_path)] == ["train", "train", "eval"]
    evaluations = [(2, 3.0)] * (1 if held_out == "0a1b2c3d" else 2)
    assert board_of(tmp_path)["eval/loss"] == evaluations
