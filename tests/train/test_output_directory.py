"""The output's disk: full, read-only, another run's; and a signal while the model is written."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from train_files import Files
from transformers import PreTrainedModel

from outcore.checkpoint import calls
from outcore.errors import StoreError
from outcore.train import loop as loop_module
from outcore.train import run as run_module
from outcore.train import subject
from outcore.train.display import Display
from outcore.train.held_room import HeldRoom
from outcore.train.metrics import read_metrics
from outcore.train.output_directory import writing
from outcore.train.room import are_on_one_disk
from outcore.train.run import train


def quiet() -> Display:
    return Display(Console(quiet=True))


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_when_the_model_is_written(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    settings = files.settings(max_steps=2)
    told = f"{settings.output} cannot be written: No space left on device.*--resume .* step 2"
    with pytest.raises(StoreError, match=told):
        train(settings, quiet())


@pytest.mark.parametrize(
    ("keep", "remedy"),
    [(2, "Make room there; --resume writes it again."), (0, "The model is written.")],
)
def test_a_disk_that_is_full_when_the_report_is_written(
    files: Files, monkeypatch: pytest.MonkeyPatch, keep: int, remedy: str
) -> None:
    monkeypatch.setattr(loop_module, "write_report", full)
    settings = files.settings(max_steps=2, keep=keep)
    told = rf"report\.html cannot be written: No space left on device\. {re.escape(remedy)}$"
    with pytest.raises(StoreError, match=told):
        train(settings, quiet())
    assert (Path(settings.output) / "model.safetensors").exists()


def test_a_checkpoint_without_room_does_not_cost_the_model(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = loop_module.Run._take_step

    def take_step(self: Any) -> Any:
        monkeypatch.setattr(calls, "free_bytes", lambda path: 1 << 20)
        return take(self)

    monkeypatch.setattr(loop_module.Run, "_take_step", take_step)
    settings = files.settings(max_steps=2)
    with pytest.raises(StoreError, match="a checkpoint takes"):
        train(settings, quiet())
    assert load_file(Path(settings.output) / "model.safetensors")


def test_what_safetensors_says_is_told_with_the_path(tmp_path: Path) -> None:
    told = r"x cannot be written: I/O error.* Make room"
    with pytest.raises(StoreError, match=told), writing(tmp_path / "x"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_a_directory_that_cannot_be_written_is_refused_first(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(run_module, "make_corpus", lambda *_, **__: pytest.fail("data was read"))
    settings = files.settings()
    with pytest.raises(ValueError, match="cannot be written to: Read-only file system; name"):
        train(settings, quiet())


def test_the_best_checkpoint_of_a_killed_run_is_not_mixed_with_anothers(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = loop_module.Run._take_step

    def killed(self: Any) -> Any:
        if self.step == 3:
            raise KeyboardInterrupt
        return take(self)

    settings = files.settings(held_out=0.2, eval_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Run, "_take_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings, quiet())
    with pytest.raises(ValueError, match="has the best checkpoint of step 2: --resume"):
        train(settings, quiet())


HOLDER = """
from pathlib import Path
from outcore.checkpoint.folder import CheckpointFolder
folder = CheckpointFolder(Path({path!r}))
folder.check_ready(0, step=0)
print("held", flush=True)
input()
"""


@pytest.mark.parametrize("keep", [0, 2])
def test_an_output_that_another_process_writes_to(files: Files, keep: int) -> None:
    settings = files.settings(max_steps=1, keep=keep)
    path = Path(settings.output) / "checkpoints"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(path=str(path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(StoreError, match=r"another process writes here\. End it, or name another"):
        train(settings, quiet())
    assert path.exists(), "the other's lock stays"
    assert not (Path(settings.output) / "metrics.jsonl").exists(), "which would be the other's"
    holder.communicate("\n", timeout=60)
    assert train(settings, quiet()).is_complete
    assert path.exists() == bool(keep)


@pytest.mark.parametrize("keep", [0, 2])
def test_a_model_that_another_run_wrote_meanwhile(
    files: Files, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    make_model, settings = subject.make_model, files.settings(max_steps=1, keep=keep)
    config = Path(settings.output) / "config.json"

    def made_beside_another(*arguments: Any) -> Any:
        config.write_text("another's")
        (config.parent / "model.safetensors").touch()
        return make_model(*arguments)

    monkeypatch.setattr(subject, "make_model", made_beside_another)
    with pytest.raises(ValueError, match="holds a model already: name another --output"):
        train(settings, quiet())
    assert config.read_text() == "another's"


@pytest.mark.parametrize("keep", [0, 2])
def test_a_signal_while_the_model_is_written_lets_it_be_finished(
    files: Files, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    save = PreTrainedModel.save_pretrained

    def signalled(self: Any, *args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save(self, *args, **options)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", signalled)
    settings = files.settings(max_steps=2, keep=keep)
    assert train(settings, quiet()).is_complete
    assert load_file(Path(settings.output) / "model.safetensors")
    assert (Path(settings.output) / "report.html").exists()


def test_a_micro_batch_of_more_than_a_step_is_told(files: Files) -> None:
    out = io.StringIO()
    train(files.settings(max_steps=1, micro_batch=64), Display(Console(file=out, width=200)))
    assert "--micro-batch 64 is more than a step has: a block works on all 4" in out.getvalue()


@pytest.mark.parametrize("is_link", [False, True])
def test_what_stands_in_the_place_of_the_checkpoints_is_told(files: Files, is_link: bool) -> None:
    settings = files.settings()
    path = Path(settings.output) / "checkpoints"
    path.parent.mkdir()
    if is_link:
        path.symlink_to("/nowhere/at/all")
    else:
        path.write_text("a file")
    told = f"cannot create {path}: File exists. What has this name is no folder"
    with pytest.raises(StoreError, match=told):
        train(settings, quiet())


def test_bf16_on_a_cpu_is_told_to_be_slower_than_predicted(files: Files) -> None:
    out = io.StringIO()
    settings = files.settings(max_steps=1, state_format="compact", device="cpu")
    train(settings, Display(Console(file=out, width=200)))
    assert "computed in bf16 on a CPU and predicted as fp32" in out.getvalue()


@pytest.mark.parametrize("option", ["data", "eval_data"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "vocab.json"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_data_that_the_run_would_write_over_is_refused(
    files: Files, option: str, name: str, *, is_linked: bool
) -> None:
    settings = files.settings()
    named = Path(settings.output) / name
    named.parent.mkdir()
    if is_linked:
        named.hardlink_to(shutil.copy(files.data, files.folder / "rows.jsonl"))
    else:
        shutil.copy(files.data, named)
    data = str(files.folder / "rows.jsonl" if is_linked else named)
    with pytest.raises(ValueError, match="is data, and the run would write a file of its own"):
        train(replace(settings, **{option: (data,)}), quiet())
    assert named.read_bytes() == files.data.read_bytes()


@pytest.mark.parametrize("resume", [False, True])
def test_the_metrics_of_somebody_else_are_not_emptied(files: Files, *, resume: bool) -> None:
    settings = files.settings(resume=resume)
    metrics = Path(settings.output) / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('\n{"epoch": 1, "loss": 0.5}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not of `outcore train`.*: move it"):
        train(settings, quiet())
    assert metrics.read_text() == '\n{"epoch": 1, "loss": 0.5}\n'


@pytest.mark.parametrize("left", ["", '{"kind": "tr', '{"kind": "eval", "step": 7}\n'])
def test_the_metrics_of_a_killed_run_are_begun_anew(files: Files, left: str) -> None:
    settings = files.settings(max_steps=1)
    metrics = Path(settings.output) / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(left)
    train(settings, quiet())
    assert [line["step"] for line in read_metrics(metrics.parent)] == [1]


@pytest.mark.parametrize("keep", [0, 2])
def test_what_is_left_of_a_model_that_could_not_be_written_is_no_model(
    files: Files, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    settings = files.settings(max_steps=1, keep=keep)
    config = Path(settings.output) / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    for resume in (False, True):
        with pytest.raises(
            ValueError, match=r"holds config\.json and no weights.*: move that away"
        ):
            train(replace(settings, resume=resume), quiet())
    config.unlink()
    assert train(settings, quiet()).is_complete


@pytest.mark.parametrize("full", ["output", "checkpoints"])
def test_checkpoints_that_are_linked_to_another_disk_are_asked_for_room_there(
    files: Files, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    settings = files.settings()
    folders = {"output": Path(settings.output), "checkpoints": files.folder / "other"}
    for folder in folders.values():
        folder.mkdir()
    (folders["output"] / "checkpoints").symlink_to(folders["checkpoints"])
    free = {str(path.resolve()): 1 << 40 for path in folders.values()}
    free[str(folders[full].resolve())] = 1 << 20
    monkeypatch.setattr(calls, "free_bytes", lambda path: free[str(Path(path).resolve())])
    monkeypatch.setattr(loop_module, "are_on_one_disk", lambda *_: False)
    monkeypatch.setattr(loop_module.Run, "_take_step", lambda self: pytest.fail("a step was taken"))
    told = {"output": r"out: the model takes", "checkpoints": r"checkpoints: a checkpoint takes"}
    with pytest.raises(StoreError, match=told[full]) as refused:
        train(settings, quiet())
    assert "of other files" not in str(refused.value)


def test_what_is_held_for_a_checkpoint_is_held_where_it_comes_to(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[Path, int]] = []

    class Room(HeldRoom):
        def __init__(self, directory: Path, num_bytes: int) -> None:
            held.append((directory.resolve(), num_bytes))
            super().__init__(directory, num_bytes)

    settings = files.settings(max_steps=1)
    other = files.folder / "other"
    other.mkdir()
    Path(settings.output).mkdir()
    (Path(settings.output) / "checkpoints").symlink_to(other)
    monkeypatch.setattr(loop_module, "HeldRoom", Room)
    train(settings, quiet())
    assert [directory for directory, _ in held] == [Path(settings.output).resolve(), other]


def test_disks_are_told_apart(tmp_path: Path) -> None:
    assert are_on_one_disk(tmp_path, tmp_path.parent)
    assert not are_on_one_disk(tmp_path, Path("/proc"))


def test_a_name_that_is_not_utf_8_is_refused_first(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module.Run, "_take_step", lambda self: pytest.fail("a step was taken"))
    settings = files.settings(os.fsdecode(b"caf\xe9"))
    with pytest.raises(ValueError, match=r"caf\\udce9' is not UTF-8, .*: name another --output"):
        train(settings, quiet())
    assert not Path(settings.output).exists()


@pytest.mark.parametrize("name", ["out", "out/below"])
def test_a_link_to_nowhere_is_not_called_a_file(files: Files, name: str) -> None:
    (files.folder / "out").symlink_to(files.folder / "gone")
    told = r"out is a link to .*gone, which is not there: name another --output"
    with pytest.raises(ValueError, match=told):
        train(files.settings(name), quiet())
    (files.folder / "gone").write_text("a file")
    with pytest.raises(
        ValueError, match=r"is a file: name another|cannot be made: Not a directory"
    ):
        train(files.settings(name), quiet())
