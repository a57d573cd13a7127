"""What goes wrong in a run costs at most the step that it happens in."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from train_files import Files

from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import LaneStoreError, NonFiniteGradient, StoreError
from outcore.train import loop as loop_module
from outcore.train import metrics as metrics_module
from outcore.train.display import Display
from outcore.train.metrics import FILE_NAME as METRICS
from outcore.train.metrics import Metrics, read_metrics
from outcore.train.objective import NextToken
from outcore.train.run import train
from outcore.train.settings import TrainSettings
from outcore.train.subject import load_tokenizer


def quiet() -> Display:
    return Display(Console(quiet=True))


def told_by(settings: TrainSettings) -> str:
    text = io.StringIO()
    train(settings, Display(Console(file=text, width=1000)))
    return text.getvalue()


def weights(settings: TrainSettings) -> dict[str, Tensor]:
    return load_file(Path(settings.output) / "model.safetensors")


def same(left: TrainSettings, right: TrainSettings) -> bool:
    a, b = weights(left), weights(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps_in(settings: TrainSettings) -> list[int]:
    return CheckpointFolder(Path(settings.output) / "checkpoints").steps()


def put_nan(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    values_of = NextToken.values

    def values(self: NextToken, model: Any, batch: Any, number: int) -> tuple[Tensor, ...]:
        (loss,) = values_of(self, model, batch, number)
        return (loss * (float("nan") if number in numbers else 1.0),)

    monkeypatch.setattr(NextToken, "values", values)


@pytest.fixture
def nan_in_the_fourth_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    put_nan(monkeypatch, 3)


@pytest.mark.filterwarnings("ignore:step 4 was skipped")
@pytest.mark.parametrize("clip_in_two_passes", [False, True])
def test_a_nan_costs_its_own_step_alone(
    files: Files, nan_in_the_fourth_batch: None, clip_in_two_passes: bool
) -> None:
    skipping = files.settings(
        "skipping", on_non_finite="skip", clip_in_two_passes=clip_in_two_passes
    )
    train(skipping, quiet())
    settings = files.settings(clip_in_two_passes=clip_in_two_passes)
    with pytest.raises(NonFiniteGradient, match="Step 3 is in a checkpoint: --resume"):
        train(settings, quiet())
    train(replace(settings, resume=True, on_non_finite="skip"), quiet())
    assert same(settings, skipping)
    assert len(read_metrics(Path(settings.output))) == 6


@pytest.mark.filterwarnings("ignore:step . was skipped")
@pytest.mark.parametrize(
    ("numbers", "max_steps", "is_measured"),
    [((), 5, True), ((3,), 5, False), ((3, 4), 8, False)],  # the steps 4 to 6 are recorded
)
def test_steps_that_are_skipped_while_lanes_are_recorded(
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, ...],
    max_steps: int,
    is_measured: bool,
) -> None:
    put_nan(monkeypatch, *numbers)
    settings = files.settings(on_non_finite="skip", max_steps=max_steps)
    result = train(settings, quiet())
    assert result.is_complete
    assert (result.measurement is not None) == is_measured
    assert steps_in(settings) == [max_steps - len(numbers)]


def test_the_checkpoint_before_a_nan_takes_no_other_ones_place(
    files: Files, nan_in_the_fourth_batch: None
) -> None:
    settings = files.settings(save_every=2, keep=1)
    with pytest.raises(NonFiniteGradient):
        train(settings, quiet())
    assert steps_in(settings) == [2, 3]


def test_a_nan_that_was_applied_is_in_no_checkpoint(
    files: Files, nan_in_the_fourth_batch: None
) -> None:
    settings = files.settings(max_grad_norm=0.0, save_every=2)
    with pytest.raises(NonFiniteGradient, match="has already applied it: load the last checkpoint"):
        train(settings, quiet())
    assert steps_in(settings) == [2]


def test_a_run_without_checkpoints_leaves_its_model_at_a_nan(
    files: Files, nan_in_the_fourth_batch: None
) -> None:
    settings = files.settings(keep=0)
    with pytest.raises(NonFiniteGradient, match="The model of step 3 is written"):
        train(settings, quiet())
    assert all(tensor.isfinite().all() for tensor in weights(settings).values())


def test_an_evaluation_that_fails_costs_no_step(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, evaluate = files.settings(held_out=0.2, eval_every=3), loop_module.evaluate

    def fail(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("no room for the logits")

    monkeypatch.setattr(loop_module, "evaluate", fail)
    with pytest.raises(torch.OutOfMemoryError):
        train(settings, quiet())
    assert steps_in(settings) == [3]
    monkeypatch.setattr(loop_module, "evaluate", evaluate)
    told = told_by(replace(settings, resume=True))
    assert "resumed after step 3" in told
    assert "step 3: held-out loss" in told
    whole = files.settings("whole", held_out=0.2, eval_every=3)
    train(whole, quiet())
    assert same(settings, whole)


@pytest.fixture
def refuse_commits(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    """Let the disk be full for these of the checkpoints, counted from 1."""

    def refuse(numbers: set[int]) -> None:
        commit, count = CheckpointFolder.commit, [0]

        def counted(self: CheckpointFolder, *args: Any) -> Path:
            count[0] += 1
            if count[0] in numbers:
                raise StoreError("the disk is full")
            return commit(self, *args)

        monkeypatch.setattr(CheckpointFolder, "commit", counted)

    return refuse


@pytest.mark.parametrize(
    ("refused", "left"), [({1}, [4, 6]), ({2}, [2, 6]), ({3}, [4, 6]), ({1, 2}, [6])]
)
def test_a_checkpoint_that_fails_does_not_end_the_run(
    files: Files, refuse_commits: Callable[[set[int]], None], refused: set[int], left: list[int]
) -> None:
    refuse_commits(refused)
    settings = files.settings(save_every=2)
    told = told_by(settings)
    assert told.count("a checkpoint could not be written, and training goes on") == len(refused)
    assert steps_in(settings) == left


def test_a_last_checkpoint_that_fails_is_an_error(
    files: Files, refuse_commits: Callable[[set[int]], None]
) -> None:
    refuse_commits({3, 4})
    settings = files.settings(save_every=2)
    with pytest.raises(StoreError, match="the disk is full"):
        train(settings, quiet())
    assert weights(settings)


def test_a_best_checkpoint_that_fails_does_not_end_the_run(
    files: Files, refuse_commits: Callable[[set[int]], None]
) -> None:
    refuse_commits({1})
    settings = files.settings(held_out=0.1, eval_every=2)
    assert "the best checkpoint so far was not written: the disk is full" in told_by(settings)
    best = CheckpointFolder(Path(settings.output) / "checkpoints" / "best").steps()
    assert best in ([4], [6])


@pytest.mark.parametrize("options", [{"save_every": 2}, {"held_out": 0.1, "eval_every": 2}])
def test_work_that_failed_ends_the_run_though_a_checkpoint_met_it(
    files: Files, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """An update may be lost, on the disk that holds the state."""

    commit, calls = CheckpointFolder.commit, []

    def fail_once(self: CheckpointFolder, *args: Any) -> Path:
        calls.append(args)
        if len(calls) == 1:
            raise LaneStoreError("background work failed: state.scratch")
        return commit(self, *args)

    monkeypatch.setattr(CheckpointFolder, "commit", fail_once)
    with pytest.raises(LaneStoreError, match=r"state\.scratch"):
        train(files.settings(**options), quiet())


class FullFile:
    """A file whose disk is full after a few bytes of the third line."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._num_lines = 0

    def write(self, line: bytes) -> int:
        self._num_lines += 1
        if self._num_lines in (3, 4):
            self._file.write(line[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(line)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_figures_without_room_do_not_end_the_run(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Filling(Metrics):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._file: Any = FullFile(self._file)

    monkeypatch.setattr(loop_module, "Metrics", Filling)
    settings = files.settings()
    assert told_by(settings).count("No space left on device; lines are missing") == 1
    assert [line["step"] for line in read_metrics(Path(settings.output))] == [1, 2, 5, 6]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # its thread's
def test_a_board_without_room_does_not_end_the_run(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread meets the full disk, and every call after that raises."""
    records = pytest.importorskip("tensorboard.summary.writer.record_writer")
    write = records.RecordWriter.write

    def refused(writer: Any, data: bytes) -> None:
        if b"train/" in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(writer, data)

    monkeypatch.setattr(records.RecordWriter, "write", refused)
    settings = files.settings(tensorboard=True)
    assert told_by(settings).count("TensorBoard gets no more figures of this run: ") == 1
    assert [line["step"] for line in read_metrics(Path(settings.output))] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\x00", b'{"a": 1}', b"5", b'{"step": null, "kind": "train"}', b"[" * 100_000]
)
def test_figures_that_cannot_be_read_do_not_keep_a_run_from_going_on(
    tmp_path: Path, line: bytes
) -> None:
    whole = b'{"kind": "train", "step": 1, "loss": 1.0}\n'
    (tmp_path / METRICS).write_bytes(whole + line + b"\n" + whole)
    metrics = metrics_module.Metrics(tmp_path, first_step=2, tensorboard=False)
    metrics.add("train", 2, loss=1.0)
    metrics.close()
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 1, 2]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"step": "2", "batches": {}, "best": None, "settings": {}},
        {"step": 2, "batches": [], "best": None, "settings": {}},
        {"step": 2, "batches": {}, "best": "x", "settings": {}},
        {"step": 2, "batches": {}, "best": None, "settings": []},
        {"step": 2, "batches": {}, "best": None, "settings": {}, "held_out": 3},
    ],
)
def test_a_checkpoint_of_another_program_is_refused(
    files: Files, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    settings = files.settings(max_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Run, "_values", lambda self: values)
        train(settings, quiet())
    with pytest.raises(StoreError, match="not of `outcore train`"):
        train(replace(settings, resume=True), quiet())


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"eos_token": 5}'])
def test_a_tokenizer_that_is_none_is_told(
    files: Files, tmp_path: Path, name: str, text: str
) -> None:
    model = shutil.copytree(files.model, tmp_path / "broken")
    (model / name).write_text(text)
    with pytest.raises(ValueError, match="has no tokenizer that can be read"):
        train(files.settings(model=str(model)), quiet())


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "Unheard"])
def test_code_that_comes_with_a_tokenizer_does_not_run(
    files: Files, tmp_path: Path, tokenizer_class: str
) -> None:
    """A class that transformers has is taken from there; any other is refused."""
    canary = tmp_path / "canary"
    code = f"from pathlib import Path\nPath({str(canary)!r}).touch()\n"
    model = shutil.copytree(files.model, tmp_path / "evil")
    (model / "tokenization_evil.py").write_text(code)
    path = model / "tokenizer_config.json"
    evil = {"auto_map": {"AutoTokenizer": [None, "tokenization_evil.Evil"]}}
    values = {**json.loads(path.read_text()), **evil, "tokenizer_class": tokenizer_class}
    path.write_text(json.dumps(values))
    with contextlib.suppress(ValueError):
        load_tokenizer(files.settings(model=str(model)))
    assert not canary.exists()


WIDE = '{"a": [' + "[]," * 10_000_000 + "[]]}"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("tokenizer.json", WIDE, "tokenizer.json would take more than 1.0 GiB of memory"),
        ("tokenizer_config.json", WIDE, "would take more than 170.0 MiB of memory"),
        ("special_tokens_map.json", WIDE, "would take more than 170.0 MiB of memory"),
        ("config.json", '{"num_labels": 1000000000}', "num_labels is 1,000,000,000, but"),
    ],
)
def test_a_tokenizer_that_would_fill_the_memory_is_not_parsed(
    files: Files, tmp_path: Path, name: str, text: str, told: str
) -> None:
    tokenizer = shutil.copytree(files.model, tmp_path / "wide")
    (tokenizer / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)):
        load_tokenizer(files.settings(tokenizer=str(tokenizer)))


def harm_the_weights_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    take = loop_module.Run._take_step

    def harmed(run: Any) -> Any:
        taken = take(run)
        if run.step == step:
            next(p for p in run.model.parameters() if p.requires_grad).data.fill_(math.nan)
        return taken

    monkeypatch.setattr(loop_module.Run, "_take_step", harmed)


@pytest.mark.filterwarnings("ignore:step . was skipped")
@pytest.mark.parametrize("save_every", [None, 2])
def test_weights_that_are_not_finite_are_no_state_to_go_on_from(
    files: Files, monkeypatch: pytest.MonkeyPatch, save_every: int | None
) -> None:
    settings = files.settings(save_every=save_every)
    remedy = "begin anew" if save_every is None else "remove the checkpoints behind that of step 2,"
    told = rf"The weights of step 3 are not finite \(in .*\), and no further.*: {remedy}"
    with monkeypatch.context() as patch:
        harm_the_weights_after(patch, 3)
        with pytest.raises(NonFiniteGradient, match=told):
            train(settings, quiet())
    skipping = replace(settings, resume=True, on_non_finite="skip", save_every=None)
    told = f"every step was skipped, .*weights of step 6 are not finite.*: {remedy}"
    with pytest.raises(NonFiniteGradient, match=told):
        train(skipping, quiet())
    assert not (Path(settings.output) / "model.safetensors").exists()
    if save_every is not None:
        shutil.rmtree(Path(settings.output) / "checkpoints" / "step-000000003")
        assert train(skipping, quiet()).is_complete


def test_a_model_of_weights_that_are_not_finite_is_not_written(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm_the_weights_after(monkeypatch, 3)
    settings = files.settings(keep=0)
    with pytest.raises(NonFiniteGradient, match="The weights of step 3 are not finite"):
        train(settings, quiet())
    assert not (Path(settings.output) / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:step . was skipped")
def test_a_run_of_which_every_step_was_skipped_does_not_end_as_if_all_were_well(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = files.settings(max_steps=2, on_non_finite="skip")
    with monkeypatch.context() as patch:
        put_nan(patch, 0, 1)
        with pytest.raises(NonFiniteGradient, match=r"every step was skipped.*is as it was before"):
            train(settings, quiet())
    put_nan(monkeypatch, 2, 3)  # of a model that two steps have trained, and that is well
    train(settings, quiet())
    assert train(replace(settings, max_steps=4, resume=True), quiet()).is_complete
