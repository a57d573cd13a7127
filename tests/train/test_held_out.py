"""Evaluation in a run: refused early or finished, and never at the cost of what was trained."""

from __future__ import annotations

import io
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from tokenizers_made_here import chat, write_jsonl
from train_files import Files

from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import read_manifest, write_manifest
from outcore.train import loop as loop_module
from outcore.train.display import Display, LiveDisplay
from outcore.train.metrics import read_metrics
from outcore.train.objective import NextToken
from outcore.train.run import train

PAIRS = [{"prompt": "the cat", "chosen": "sat on", "rejected": "mat"}] * 8
EASY = [{"messages": chat("the cat", "cat the")}] * 8
HARD = [{"messages": chat("?", "%§&/()=")}] * 8
LONG = [{"messages": chat("the " * 200, "cat")}] * 3


def quiet() -> Display:
    return Display(Console(quiet=True))


def evaluated(output: str | Path) -> list[int]:
    return [line["step"] for line in read_metrics(Path(output)) if line["kind"] == "eval"]


def best_steps(output: str) -> list[int]:
    return CheckpointFolder(Path(output) / "checkpoints" / "best").steps()


@pytest.mark.parametrize(
    ("rows", "eval_rows", "lora", "told"),
    [
        (None, PAIRS, False, "rows of messages, eval_data of preference"),
        (PAIRS, None, False, "rows of preference, eval_data of messages"),
        (PAIRS, None, True, "rows of preference, eval_data of messages"),
        (None, LONG, False, "eval_data: no sequences: 3 of 3 examples"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_step_is_taken(
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    rows: Any,
    eval_rows: Any,
    lora: bool,
    told: str,
) -> None:
    monkeypatch.setattr(loop_module.Run, "_take_step", lambda self: pytest.fail("a step was taken"))
    data, eval_data = (
        files.data if made is None else write_jsonl(files.folder / f"{name}.jsonl", made)
        for name, made in (("data", rows), ("eval", eval_rows))
    )
    settings = files.settings(data=(str(data),), eval_data=(str(eval_data),), lora=lora)
    with pytest.raises(ValueError, match=told):
        train(settings, quiet())


def test_an_evaluation_that_fails_costs_nothing_that_was_trained(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for logits")

    settings = files.settings(held_out=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "evaluate", fail)
        with pytest.raises(MemoryError):
            train(settings, quiet())
    assert load_file(Path(settings.output) / "model.safetensors")
    assert (Path(settings.output) / "checkpoints" / "step-000000006").is_dir()
    again = train(replace(settings, resume=True), quiet())
    assert again.eval_loss is not None
    assert evaluated(settings.output) == [6]


def test_a_held_out_loss_that_is_no_number_is_never_the_best(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = loop_module.evaluate
    found: list[float] = []

    def sometimes(*args: Any, **options: Any) -> Any:
        real = evaluate(*args, **options)
        assert real is not None
        found.append(math.nan if not found else real.loss)
        return replace(real, loss=found[-1])

    monkeypatch.setattr(loop_module, "evaluate", sometimes)
    settings = files.settings(max_steps=3, held_out=0.2, eval_every=1)
    train(settings, quiet())
    assert len(found) == 3
    assert best_steps(settings.output) == [1 + min((2, 1), key=lambda i: found[i])]


def test_a_stop_does_not_wait_for_an_evaluation_and_a_resumed_run_makes_up_for_it(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"held_out": 0.2, "eval_every": 2}
    whole, cut = files.settings("whole", **options), files.settings("cut", **options)
    train(whole, quiet())
    held_out, calls = NextToken.held_out, []

    def asked_to_stop(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return held_out(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(NextToken, "held_out", asked_to_stop)
        result = train(cut, quiet())
    assert (result.step, result.stopped_by, len(calls)) == (2, "SIGTERM", 2)
    assert evaluated(cut.output) == []
    train(replace(cut, resume=True), quiet())
    lines = [
        [(line["kind"], line["step"], line["loss"]) for line in read_metrics(Path(name))]
        for name in (whole.output, cut.output)
    ]
    assert lines[0] == lines[1]
    assert best_steps(whole.output) == best_steps(cut.output)


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize(
    ("where", "at_step", "told", "lacking"),
    [
        ((loop_module.Run, "_take_step"), 2, "finishing this step, then saving", None),
        ((NextToken, "held_out"), 2, "breaking off the evaluation, then saving", 2),
        ((loop_module, "copy_processor"), 4, "finishing what is being saved", 4),
        ((NextToken, "held_out"), 4, "breaking off the evaluation; the model is saved", 4),
    ],
    ids=["in a step", "evaluating", "saving", "evaluating at the end"],
)
def test_a_stop_is_told_as_what_it_does_and_what_lacks_is_made_up_for(
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[Any, str],
    at_step: int,
    told: str,
    lacking: int | None,
    *,
    is_live: bool,
) -> None:
    num_steps = 4 if at_step == 4 else 5
    settings = files.settings(max_steps=num_steps, held_out=0.2, eval_every=2)
    written, real, signals = io.StringIO(), getattr(*where), [signal.SIGTERM]
    console = Console(file=written, width=200, force_terminal=is_live, color_system=None)
    init = loop_module.Run.__init__
    runs: list[loop_module.Run] = []

    def kept(self: loop_module.Run, *args: Any) -> None:
        runs.append(self)
        init(self, *args)

    def stopped(*args: Any) -> Any:
        if runs[0].step == at_step and signals:
            os.kill(os.getpid(), signals.pop())
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Run, "__init__", kept)
        patch.setattr(*where, stopped)
        result = train(settings, (LiveDisplay if is_live else Display)(console))
    assert f"SIGTERM: {told}; another one ends it at once" in written.getvalue()
    assert result.stopped_by == "SIGTERM"
    lack = f"no held-out loss of step {lacking}: its evaluation was broken off; --resume makes up"
    assert (lack in written.getvalue()) is (lacking is not None)
    assert lacking not in evaluated(settings.output)
    page = (Path(settings.output) / "report.html").read_text()
    assert ("the last evaluation was broken off by SIGTERM; --resume" in page) is (lacking == 4)
    again = train(replace(settings, resume=True), quiet())
    assert (again.stopped_by, again.eval_loss is not None) == (None, True)
    assert evaluated(settings.output) == sorted({2, 4, num_steps})


def test_a_finished_run_is_evaluated_once_however_often_it_is_resumed(files: Files) -> None:
    settings = files.settings(max_steps=4, held_out=0.2, eval_every=2)
    first = train(settings, quiet())
    again = train(replace(settings, resume=True), quiet())
    assert again.eval_loss == first.eval_loss
    assert evaluated(settings.output) == [2, 4]


def test_the_step_after_an_evaluation_is_not_longer_for_it(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = loop_module.evaluate

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(1.5)
        return evaluate(*args, **options)

    monkeypatch.setattr(loop_module, "evaluate", slowly)
    settings = files.settings(max_steps=3, held_out=0.2, eval_every=2)
    train(settings, quiet())
    (third,) = [line for line in read_metrics(Path(settings.output)) if line["step"] == 3][:1]
    assert third["step_s"] < 1.5


def test_the_best_of_a_killed_run_is_known_to_the_one_that_goes_on(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated after every step and killed in the sixth, it has a checkpoint of the fourth."""
    evaluate, take = loop_module.evaluate, loop_module.Run._take_step
    losses = iter([5.0, 4.0, 3.0, 2.0, 1.0, 1.5, 0.9])  # of steps 1 to 5, then of 5 and 6

    def given(*args: Any, **options: Any) -> Any:
        real = evaluate(*args, **options)
        assert real is not None
        return replace(real, loss=next(losses))

    def killed(self: Any) -> Any:
        if self.step == 5:
            raise KeyboardInterrupt
        return take(self)

    monkeypatch.setattr(loop_module, "evaluate", given)
    settings = files.settings(max_steps=6, held_out=0.2, eval_every=1, save_every=4)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Run, "_take_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings, quiet())
    best = Path(settings.output) / "checkpoints" / "best"
    of_step_5 = best / "step-000000005"
    assert of_step_5.is_dir()
    seen: list[bool] = []

    def watched(self: Any) -> Any:
        seen.append(of_step_5.is_dir() and best_steps(settings.output) == [5])
        return take(self)

    monkeypatch.setattr(loop_module.Run, "_take_step", watched)
    train(replace(settings, resume=True), quiet())
    assert seen == [True, True]  # 1.5 is not better than 1.0
    assert best_steps(settings.output) == [6]


def test_the_best_checkpoint_becomes_a_model(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = files.settings(max_steps=4, held_out=0.2, eval_every=1, lr=0.1, warmup=0)
    train(settings, quiet())
    lines = [line for line in read_metrics(Path(settings.output)) if line["kind"] == "eval"]
    best = min(lines, key=lambda line: line["loss"])
    assert best_steps(settings.output) == [best["step"]]
    alone = replace(settings, output=str(files.folder / "best"), max_steps=best["step"])
    copied = Path(alone.output) / "checkpoints"
    shutil.copytree(Path(settings.output) / "checkpoints" / "best", copied)
    monkeypatch.setattr(loop_module.Run, "_take_step", lambda self: pytest.fail("a step was taken"))
    assert train(replace(alone, resume=True), quiet()).eval_loss == best["loss"]
    assert load_file(Path(alone.output) / "model.safetensors")


@pytest.mark.filterwarnings("ignore:step 1 was skipped")
def test_a_better_one_after_a_skipped_step_takes_the_place_of_a_later_one(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    values_of = NextToken.values

    def values(self: NextToken, model: Any, batch: Any, number: int) -> Any:
        is_bad = number == 0 and model.training
        (loss,) = values_of(self, model, batch, number)
        return (loss * (math.nan if is_bad else 1.0),)

    monkeypatch.setattr(NextToken, "values", values)
    settings = files.settings(max_steps=3, held_out=0.2, eval_every=1, save_every=1, warmup=0)
    settings = replace(settings, keep=3, lr=1e-4, on_non_finite="skip", schedule="constant")
    train(settings, quiet())
    assert best_steps(settings.output) == [2]  # of the optimizer, whose first step was left out
    for name in ("step-000000001", "step-000000002"):  # as if killed after the first step
        shutil.rmtree(Path(settings.output) / "checkpoints" / name)
    train(replace(settings, resume=True, max_steps=2, lr=1e-2), quiet())
    assert best_steps(settings.output) == [1]


def test_a_better_one_of_an_earlier_step_takes_the_place_of_a_later_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "best", keep=1)
    folder.commit(8, 0, lambda _: ((), {}))
    folder.give_up_after(6)
    folder.commit(6, 0, lambda _: ((), {}))
    folder.close()
    assert folder.steps() == [6]


@pytest.mark.parametrize("changes", [True, False])
def test_the_best_of_other_held_out_data_does_not_count(files: Files, *, changes: bool) -> None:
    """Losses over two files cannot be compared, and the harder one would never have a best."""
    eval_data = write_jsonl(files.folder / "held-out.jsonl", EASY)
    settings = files.settings(
        eval_data=(str(eval_data),), eval_every=2, save_every=4, max_steps=4, schedule="constant"
    )
    train(settings, quiet())
    assert best_steps(settings.output) == [4]
    if changes:
        write_jsonl(eval_data, HARD)
    written = io.StringIO()
    more = replace(settings, max_steps=7, resume=True)
    train(more, Display(Console(file=written, width=200)))
    lines = [line for line in read_metrics(Path(settings.output)) if line["kind"] == "eval"]
    losses, sets = ([line[name] for line in lines] for name in ("loss", "held_out"))
    assert len(set(sets[:2])) == len(set(sets[2:])) == 1
    assert (sets[0] != sets[-1]) is changes
    if changes:
        assert min(losses[2:]) > max(losses[:2]), "both are as easy"
    assert ("does not count" in written.getvalue()) is changes
    assert best_steps(settings.output)[0] >= 6


@pytest.mark.parametrize("eval_every", [4, 5])
def test_a_measured_step_has_no_evaluation_in_it(files: Files, eval_every: int) -> None:
    settings = files.settings(max_steps=8, held_out=0.2, eval_every=eval_every)
    measurement = train(settings, quiet()).measurement
    assert measurement is not None
    assert not [span for span in measurement.spans if span.name.startswith("inference")]


@pytest.mark.parametrize("change", ["none", "beta", "of an older version"])
def test_the_best_of_another_beta_does_not_count(files: Files, change: str) -> None:
    """The loss of pairs is in units of beta: with less of it, any model's is larger or smaller."""
    data = write_jsonl(files.folder / "pairs.jsonl", PAIRS)
    settings = files.settings(
        data=(str(data),),
        eval_data=(str(data),),
        eval_every=2,
        save_every=4,
        max_steps=4,
        schedule="constant",
        dpo_beta=2.0,
    )
    train(settings, quiet())
    best = Path(settings.output) / "checkpoints" / "best" / "step-000000004"
    if change == "of an older version":
        manifest = read_manifest(best)
        del manifest.values["run"]["held_out"]["dpo_beta"]
        (best / "manifest.json").unlink()
        write_manifest(best, manifest)
    written = io.StringIO()
    beta = 1e-3 if change == "beta" else 2.0
    more = replace(settings, max_steps=6, resume=True, dpo_beta=beta)
    train(more, Display(Console(file=written, width=200)))
    told = "the held-out data, or --dpo-beta, is not what it was: the best checkpoint so far does"
    assert (told in written.getvalue()) is (change != "none")
    lines = [line for line in read_metrics(Path(settings.output)) if line["kind"] == "eval"]
    assert len({line["held_out"] for line in lines}) == (2 if change == "beta" else 1)
    assert best_steps(settings.output) == [6]


@pytest.mark.parametrize("lr", [1e-3, 2e-3])
def test_the_best_of_steps_that_were_given_up_does_not_count(
    files: Files, monkeypatch: pytest.MonkeyPatch, lr: float
) -> None:
    """With the same settings the same steps come again, as after a kill."""
    evaluate, losses = loop_module.evaluate, iter([3.0, 1.0, 2.0])  # of steps 2 and 4, then of 4

    def given(*args: Any, **options: Any) -> Any:
        real = evaluate(*args, **options)
        assert real is not None
        return replace(real, loss=next(losses))

    monkeypatch.setattr(loop_module, "evaluate", given)
    settings = files.settings(max_steps=4, held_out=0.2, eval_every=2, save_every=2, lr=1e-3)
    train(settings, quiet())
    assert best_steps(settings.output) == [4]
    shutil.rmtree(Path(settings.output) / "checkpoints" / "step-000000004")
    written = io.StringIO()
    more = replace(settings, resume=True, lr=lr)
    train(more, Display(Console(file=written, width=200)))
    told = "the best checkpoint so far is of step 4 with other settings: it does not count"
    assert (told in written.getvalue()) is (lr != 1e-3)
    (best,) = (Path(settings.output) / "checkpoints" / "best").glob("step-000000004*")
    assert read_manifest(best).values["run"]["best"] == (1.0 if lr == 1e-3 else 2.0)
