"""Any one system call may fail: the error says where, and nothing that was there is lost."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import Run, assert_same
from torch import Tensor

from outcore.checkpoint import calls
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import StoreError

HOST = {"weights": "host", "state": "host"}
WRITING = (
    "make_directory",
    "create",
    "allocate",
    "write_at",
    "sync",
    "sync_directory",
    "rename",
    "remove_tree",
    "close",
    "list_names",
    "free_bytes",
)
# What fails here takes room or says nothing that matters: the checkpoint is committed all the same.
HARMLESS = {"remove_tree", "close"}
READING = ("list_names", "open_to_read", "status", "read_at", "forget_cached", "close")


class Faults:
    """Counts the calls of some names; makes one of them go wrong."""

    def __init__(self, patch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
        self.num_calls: dict[str, int] = dict.fromkeys(names, 0)
        self._wrong: tuple[str, int, str] | None = None
        self._lock = threading.Lock()
        for name in names:
            patch.setattr(calls, name, self._wrap(name, getattr(calls, name)))

    def arrange(self, name: str, number: int, fault: str) -> None:
        """Let the call of this name with this number, from 0 on, go wrong once."""
        self.num_calls = dict.fromkeys(self.num_calls, 0)
        self._wrong = name, number, fault

    def none(self) -> None:
        self.num_calls = dict.fromkeys(self.num_calls, 0)
        self._wrong = None

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            with self._lock:
                number = self.num_calls[name]
                self.num_calls[name] += 1
            if self._wrong is None or self._wrong[:2] != (name, number):
                return call(*args)
            if name == "close":  # the descriptor must not leak all the same
                call(*args)
            fault = self._wrong[2]
            if fault != "short":
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code))
            fd, memory, offset = args
            moved = memory.size // 2
            part = np.empty(moved, np.uint8)
            part[:] = memory[:moved]
            call(fd, part, offset)
            memory_or_none = memory if name == "read_at" else None
            if memory_or_none is not None:
                memory_or_none[:moved] = part
            return moved

        return wrapped


def numbers(count: int) -> list[int]:
    """Some of the calls of one name: the first ones, the last ones, and between."""
    return sorted({0, 1, count // 2, count - 2, count - 1} & set(range(count)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_call_of_a_commit_that_fails(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, **HOST)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    run.step()
    checkpoints = AsyncCheckpoints(folder, run.model, run.optimizer)

    def save() -> None:
        if mode == "sync":
            run.save(folder)
        else:
            checkpoints.begin(run.values())
            checkpoints.wait()

    save()
    faults = Faults(monkeypatch, WRITING)
    save()
    counts = dict(faults.num_calls)
    assert all(counts.values()), counts
    tried = 0
    for name in WRITING:
        # The files are written by the same code in both.
        for number in range(counts[name]) if mode == "sync" else numbers(counts[name]):
            others = ["ENOSPC", "EINTR", *(["short"] if name == "write_at" else [])]
            for fault in ("EIO", *(others if number in (0, counts[name] - 1) else [])):
                before = state_of(run)
                faults.arrange(name, number, fault)
                error = error_of(save)
                where = (name, number, fault)
                if error is None:
                    is_of_pruning = name == "list_names" or (name == "rename" and number > 0)
                    is_harmless = name in HARMLESS or fault in ("EINTR", "short")
                    assert is_harmless or is_of_pruning, where
                else:
                    assert fault not in ("EINTR", "short"), where
                    assert name not in HARMLESS, where
                    assert str(folder.path) in str(error), where
                    assert os.strerror(getattr(errno, fault)) in str(error), where
                    assert error.path is not None, where
                faults.none()
                assert state_of(run) == before, "training goes on as if nothing had been tried"
                assert folder.steps() == [1]
                if name != "remove_tree":
                    left = [p.name for p in folder.path.iterdir()]
                    assert not [n for n in left if n.startswith(".writing")], (name, number)
                tried += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run.load(folder) == 1, name
    assert tried > (sum(counts.values()) if mode == "sync" else 60)
    save()
    checkpoints.close()
    assert [p.name for p in folder.path.iterdir() if p.name.startswith(".writing")] == []


def error_of(call: Callable[[], Any]) -> StoreError | None:
    try:
        call()
    except StoreError as error:
        return error
    return None


def state_of(run: Run) -> bytes:
    tensors = run.tensors().values()
    return b"".join(t.numpy().tobytes() for t in tensors) + torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("fault", ["EIO", "EINTR", "short"])
def test_each_call_of_a_load_that_fails(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is read all the same, or the one before is, or the error says why not."""
    run = Run(tmp_path, **HOST)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    states: dict[int, dict[str, Tensor]] = {}
    for step in (1, 2):
        run.step()
        run.save(folder)
        states[step] = run.tensors()
    faults = Faults(monkeypatch, READING)
    assert run.load(folder) == 2
    counts = dict(faults.num_calls)
    assert all(counts.values()), counts
    for name in READING if fault != "short" else ("read_at",):
        for number in range(counts[name]) if fault == "EIO" else numbers(counts[name]):
            faults.arrange(name, number, fault)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                steps: list[int | None] = []
                error = error_of(lambda into=steps: into.append(run.load(folder)))
            faults.none()
            if error is not None:
                assert fault == "EIO", (name, number)
                assert str(folder.path) in str(error)
            step = steps[0] if steps else None
            if fault != "EIO" or name in ("forget_cached", "close"):
                assert step == 2, (name, number)
            if step is not None:
                assert bool(told) == (step == 1)
                assert_same(run.tensors(), states[step])
    assert run.load(folder) == 2


def test_a_failed_one_is_told_by_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, **HOST)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    checkpoints = AsyncCheckpoints(folder, run.model, run.optimizer)
    faults = Faults(monkeypatch, ("sync",))
    for ending in ("begin", "wait", "close"):
        run.step()
        faults.arrange("sync", 2, "ENOSPC")
        checkpoints.begin(run.values())
        run.step()  # goes on
        with pytest.raises(StoreError, match="No space left on device") as caught:
            checkpoints.begin(run.values()) if ending == "begin" else getattr(checkpoints, ending)()
        assert caught.value.path is not None
        faults.none()
        assert folder.steps() == []
        if ending != "close":
            assert checkpoints.wait() is None  # told once
    assert [p.name for p in folder.path.iterdir()] == [".lock"]
