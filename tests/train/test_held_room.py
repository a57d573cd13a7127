"""The room for what a run ends with is held on the disk while it trains, and let go when needed."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from train_files import Files
from transformers import PreTrainedModel

from outcore.checkpoint.contents import checkpoint_bytes
from outcore.errors import StoreError
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


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_allocates_nothing_ahead_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(held_room, "_allocate", refuse)
    room = HeldRoom(tmp_path, MIB)
    assert not room.is_held
    room.give_back()


def test_no_bytes_are_not_held(tmp_path: Path) -> None:
    assert not HeldRoom(tmp_path, 0).is_held


def test_more_than_there_is_is_refused_and_takes_nothing(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bfree
    with pytest.raises(StoreError, match=r"cannot be held there: (File too large|No space left)"):
        HeldRoom(tmp_path, 1 << 60)
    assert os.statvfs(tmp_path).f_bfree > free // 2
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_told_before_the_first_step(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "_take_step", lambda self: pytest.fail("a step was taken"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))  # below what is beside a model
    try:
        with pytest.raises(StoreError, match=r"File too large\. Raise the limit .*`ulimit -f`"):
            train(files.settings(), Display(Console(quiet=True)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
