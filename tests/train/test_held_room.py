"""The room for what a run ends with is held on the disk while it trains, and let go when needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from train_files import Files
from transformers import PreTrainedModel

from outcore.checkpoint.contents import checkpoint_bytes
from outcore.train import held_room
from outcore.train.display import Display
from outcore.train.held_room import HeldRoom
from outcore.train.loop import Run
from outcore.train.room import model_bytes
from outcore.train.run import train
from outcore.train.steady_checkpoints import SteadyCheckpoints

MIB = 2**20


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where temporary files lie in memory, which allocates as a disk does."""
    monkeypatch.setattr(held_room, "lies_in_memory", lambda path: False)


def held_bytes(room: HeldRoom) -> int:
    if room._file is None:
        return 0
    return os.fstat(room._file.fileno()).st_blocks * 512


def test_it_takes_room_without_a_name_and_gives_it_back(tmp_path: Path) -> None:
    room = HeldRoom(tmp_path, 3 * MIB)
    assert held_bytes(room) >= 3 * MIB
    assert list(tmp_path.iterdir()) == []
    other = os.dup(room._file.fileno())  # type: ignore[union-attr]  # as a forked process has it
    room.give_back()
    room.give_back()
    assert not room.is_held
    assert os.fstat(other).st_blocks == 0
    os.close(other)


@pytest.mark.parametrize("num_bytes", [0, 1 << 60])
def test_what_cannot_be_held_is_not(tmp_path: Path, num_bytes: int) -> None:
    free = os.statvfs(tmp_path).f_bfree
    room = HeldRoom(tmp_path, num_bytes)
    assert not room.is_held
    room.give_back()
    assert os.statvfs(tmp_path).f_bfree > free // 2


def test_memory_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_room, "lies_in_memory", lambda path: True)
    assert not HeldRoom(tmp_path, MIB).is_held


@pytest.mark.parametrize(
    ("options", "is_only_checkpoint"),
    [({}, True), ({"lora": True}, True), ({"save_every": 2}, False), ({"keep": 0}, False)],
    ids=str,
)
def test_a_run_holds_what_it_ends_with(
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    is_only_checkpoint: bool,
) -> None:
    runs: list[Run] = []
    take, save, write = Run._take_step, PreTrainedModel.save_pretrained, SteadyCheckpoints.write

    def take_step(run: Run) -> Any:
        runs.append(run)
        needed = model_bytes(run.model, only_adapters=run.settings.lora)
        assert held_bytes(run.room_for_model) >= needed
        if is_only_checkpoint:
            needed = checkpoint_bytes(run.model, run.optimizer)
            assert held_bytes(run.room_for_checkpoint) >= needed
        else:
            assert not run.room_for_checkpoint.is_held
        return take(run)

    def write_checkpoint(*arguments: Any) -> Any:
        assert not runs[-1].room_for_checkpoint.is_held
        assert runs[-1].room_for_model.is_held  # nobody else takes it meanwhile
        return write(*arguments)

    def save_model(*arguments: Any, **named: Any) -> Any:
        assert not runs[-1].room_for_model.is_held
        return save(*arguments, **named)

    monkeypatch.setattr(Run, "_take_step", take_step)
    monkeypatch.setattr(SteadyCheckpoints, "write", write_checkpoint)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_model)
    train(files.settings(max_steps=3, **options), Display(Console(quiet=True)))
    assert len(runs) == 3


def test_a_run_that_fails_holds_nothing(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Run] = []

    def fail(run: Run) -> Any:
        runs.append(run)
        assert run.room_for_model.is_held
        raise ZeroDivisionError

    monkeypatch.setattr(Run, "_take_step", fail)
    with pytest.raises(ZeroDivisionError):
        train(files.settings(), Display(Console(quiet=True)))
    assert not runs[0].room_for_model.is_held
    assert not runs[0].room_for_checkpoint.is_held
