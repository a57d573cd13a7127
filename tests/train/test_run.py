"""Whole runs: what they write, and that a stop anywhere changes no bit of it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers_made_here import chat, write_jsonl
from train_files import Files, write_chats, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import outcore
from outcore.checkpoint import calls, run_state
from outcore.checkpoint.contents import checkpoint_bytes
from outcore.data.batches import Batch
from outcore.errors import BadRow, DoesNotFit, StoreError
from outcore.planning.plan import Job, Plan
from outcore.train import loop as loop_module
from outcore.train.display import Display, LiveDisplay
from outcore.train.figures import TrainResult
from outcore.train.metrics import read_metrics
from outcore.train.objective import NextToken
from outcore.train.room import model_bytes
from outcore.train.run import train
from outcore.train.settings import TrainSettings


def quiet() -> Display:
    return Display(Console(quiet=True))


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def same(left: Path, right: Path) -> bool:
    a, b = weights(left), weights(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(output) if line["kind"] == "train"]


def stopped_after(
    monkeypatch: pytest.MonkeyPatch, settings: TrainSettings, step: int
) -> TrainResult:
    """Run with a stop that arrives while ``step`` is taken."""
    take = loop_module.Run._take_step

    def take_step(self: Any) -> Any:
        taken = take(self)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(loop_module.Run, "_take_step", take_step)
        return train(settings, quiet())


def test_the_first_step_is_told_at_once_and_others_one_later(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To know a loss is to wait for it; the first took long, and someone may look for it."""
    output, told_before = Path(files.settings().output), []
    take = loop_module.Run._take_step

    def take_step(self: Any) -> Any:
        told_before.append(len(losses(output)))
        return take(self)

    monkeypatch.setattr(loop_module.Run, "_take_step", take_step)
    train(files.settings(max_steps=4), quiet())
    assert told_before == [0, 1, 1, 2]
    assert len(losses(output)) == 4


def test_a_run_ends_as_a_hugging_face_directory(files: Files) -> None:
    settings = files.settings(max_steps=12, held_out=0.2, eval_every=4, save_every=5)
    result = train(settings, quiet())
    output = Path(settings.output)
    assert result.is_complete
    assert result.stopped_by is None
    model = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.isfinite().all()
    taken = losses(output)
    assert len(taken) == 12
    assert sum(taken[-3:]) < sum(taken[:3])
    evaluated = [line for line in read_metrics(output) if line["kind"] == "eval"]
    assert [line["step"] for line in evaluated] == [4, 8, 12]
    assert evaluated[-1]["loss"] < evaluated[0]["loss"]
    assert result.eval_loss == pytest.approx(evaluated[-1]["loss"])
    steps = sorted(entry.name for entry in (output / "checkpoints").glob("[!.]*"))
    assert steps == ["best", "step-000000010", "step-000000012"]
    page = (output / "report.html").read_text()
    assert "held out" in page
    assert "Measured" in page
    assert "<polyline" in page


def test_the_held_out_loss_is_the_mean_over_tokens(files: Files) -> None:
    """Whatever the batches: of 4 sequences, or of one each."""
    many = train(files.settings("many", max_steps=1, held_out=0.2, lr=0.0), quiet())
    one = files.settings("one", max_steps=1, held_out=0.2, lr=0.0, tokens_per_step=64)
    assert train(one, quiet()).eval_loss == pytest.approx(many.eval_loss, rel=1e-5)


def test_packed_documents_do_not_see_each_other_when_held_out(files: Files) -> None:
    packed, apart = (
        train(files.settings(name, max_steps=1, held_out=0.2, lr=0.0, packing=packing), quiet())
        for name, packing in (("packed", True), ("apart", False))
    )
    assert packed.eval_loss == pytest.approx(apart.eval_loss, rel=1e-5)


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_stopped_run_goes_on_to_the_same_bits(
    files: Files, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    whole = files.settings("whole", save_every=4)
    train(whole, quiet())
    cut = files.settings("cut", save_every=4)
    first = stopped_after(monkeypatch, cut, step)
    assert (first.step, first.stopped_by) == (step, "SIGTERM")
    assert not (Path(cut.output) / "model.safetensors").exists()
    resumed = train(files.settings("cut", save_every=4, resume=True, device_memory="3MiB"), quiet())
    assert resumed.is_complete
    assert same(Path(whole.output), Path(cut.output))
    assert losses(Path(whole.output)) == losses(Path(cut.output))


@pytest.mark.parametrize("save_every", [None, 2])
def test_a_copy_of_the_state_is_held_only_where_the_plan_counts_it(
    files: Files, save_every: int | None
) -> None:
    result = train(files.settings(max_steps=4, save_every=save_every), quiet())
    (host,) = [tier for tier in result.tiers if tier.tier == "host"]
    assert ("checkpoint staging" in host.purposes) == (save_every is not None)


def test_the_plan_counts_the_masks_of_packed_sequences(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    make = outcore.plan

    def plan(*args: Any, **options: Any) -> Plan:
        made = make(*args, **options)
        jobs.append(made.job)
        return made

    monkeypatch.setattr(outcore, "plan", plan)
    train(files.settings(max_steps=1), quiet())
    assert [job.is_masked for job in jobs] == [True]


def test_a_run_without_checkpoints_leaves_its_model(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = stopped_after(monkeypatch, files.settings("cut", keep=0), 2)
    assert (result.step, result.stopped_by, result.is_resumable) == (2, "SIGTERM", False)
    assert not (result.output / "checkpoints").exists()
    assert AutoModelForCausalLM.from_pretrained(result.output).num_parameters() > 0
    with pytest.raises(ValueError, match="keep=0"):
        files.settings("none", keep=0, save_every=2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keep": 0}, "the model takes .* and 64.0 MiB are left to spare; 1.0 MiB are free"),
        ({}, "more are needed with .* of other files, and 64.0 MiB to spare; 1.0 MiB are free"),
    ],
)
def test_room_for_the_model_is_asked_for_up_front(
    files: Files, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(calls, "free_bytes", lambda path: 1 << 20)
    monkeypatch.setattr(loop_module.Run, "_take_step", lambda self: pytest.fail("a step was taken"))
    with pytest.raises(StoreError, match=named):
        train(files.settings(**options), quiet())


@pytest.mark.parametrize(("eval_every", "most"), [(None, 0), (100, 1), (4, 2)])
def test_the_best_checkpoint_needs_room_too(
    files: Files, monkeypatch: pytest.MonkeyPatch, eval_every: int | None, most: int
) -> None:
    asked: list[float] = []

    def check_ready(folder: Any, model: Any, optimizer: Any, **options: Any) -> None:
        best_bytes = options["beside_bytes"] - model_bytes(model, only_adapters=False)
        asked.append(best_bytes / checkpoint_bytes(model, optimizer))

    monkeypatch.setattr(run_state, "check_ready", check_ready)
    train(files.settings(max_steps=8, held_out=0.2, eval_every=eval_every), quiet())
    assert asked == [most]


def test_a_run_holds_no_file_open_for_its_checkpoints(files: Files) -> None:
    """Each better evaluation writes a checkpoint; there may be thousands."""
    settings = files.settings(held_out=0.2, eval_every=1, save_every=2)
    train(settings, quiet())
    assert (Path(settings.output) / "checkpoints" / "best" / ".lock").exists()
    assert open_files(settings.output) == []


def open_files(below: str) -> list[str]:
    """Return what this process has open in a directory."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(os.path.realpath(below))]


def test_a_finished_run_is_left_as_it_is(files: Files) -> None:
    settings = files.settings()
    train(settings, quiet())
    before = weights(Path(settings.output))
    again = train(files.settings(resume=True), quiet())
    assert again.is_complete
    assert all(torch.equal(t, before[n]) for n, t in weights(Path(settings.output)).items())
    assert len(losses(Path(settings.output))) == 6


def test_a_checkpoint_that_was_there_is_not_told_to_be_saved(files: Files) -> None:
    settings = files.settings(max_steps=2)
    told = [io.StringIO(), io.StringIO()]
    for text, resume in zip(told, (False, True), strict=True):
        train(replace(settings, resume=resume), Display(Console(file=text, width=1000)))
    saved = [re.findall(r"saved (?:.*/)?(\S+) in", text.getvalue()) for text in told]
    assert saved == [["step-000000002", "out"], ["out"]]


def test_a_second_run_does_not_begin_over_the_first(files: Files) -> None:
    train(files.settings(), quiet())
    with pytest.raises(ValueError, match="checkpoint of step 6: --resume"):
        train(files.settings(), quiet())


def test_data_that_is_not_there_leaves_nothing_behind(files: Files) -> None:
    settings = replace(files.settings(), data=("nowhere.jsonl",))
    with pytest.raises(ValueError, match="does not exist"):
        train(settings, quiet())
    assert not Path(settings.output).exists()


@pytest.mark.parametrize("option", ["output", "cache_dir"])
def test_nothing_is_written_among_the_data(files: Files, option: str) -> None:
    """It would be data itself when the run goes on."""
    folder = files.folder / "rows"
    folder.mkdir()
    write_chats(folder / "a.jsonl", 8)
    inside = {option: str(folder / "out")}
    with pytest.raises(ValueError, match=f"of which every file .* --{option.replace('_', '-')}"):
        train(files.settings(data=(str(folder),), **inside), quiet())
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]


def test_a_row_that_was_left_out_is_named(files: Files, tmp_path: Path) -> None:
    rows = Path(files.settings().data[0]).read_text().splitlines()
    rows.insert(6, '{"messages": ')
    data = tmp_path / "bad.jsonl"
    data.write_text("\n".join(rows))
    out = io.StringIO()
    settings = replace(files.settings(max_steps=1, skip_bad_rows=True), data=(str(data),))
    train(settings, Display(Console(file=out, width=400)))
    assert re.search(r"left out: 1 rows; the first is \S*bad.jsonl, line 7: ", out.getvalue())


def test_no_model_is_overwritten(files: Files) -> None:
    settings = files.settings(max_steps=1, keep=0)
    with pytest.raises(ValueError, match="is the model that would be trained"):
        train(replace(settings, output=settings.model), quiet())
    train(settings, quiet())
    with pytest.raises(ValueError, match="holds a model already"):
        train(settings, quiet())


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_a_device_that_is_not_there_is_refused_first(
    files: Files, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = files.settings(device=device)
    with pytest.raises(ValueError, match=f"device (must be|is).*{device}"):
        train(settings, quiet())
    assert not Path(settings.output).exists()


def test_sequences_that_the_model_was_not_made_for_are_told(files: Files) -> None:
    out = io.StringIO()
    train(files.settings(max_steps=1, seq_len=512, tokens_per_step=512), Display(Console(file=out)))
    assert "sequences of 512 tokens, but the model was made for" in out.getvalue()


def test_other_data_is_refused_by_a_resumed_run(files: Files) -> None:
    train(files.settings(max_steps=2), quiet())
    other = write_chats(files.folder / "other.jsonl", seed=1)
    with pytest.raises(StoreError, match="other data"):
        train(files.settings(max_steps=4, data=(str(other),), resume=True), quiet())


def test_other_batches_are_refused_with_the_setting_that_makes_them(files: Files) -> None:
    train(files.settings(max_steps=2), quiet())
    before = files.settings().tokens_per_step
    told = f"other batches.* Other settings than before: .*tokens_per_step was {before}, is 1024"
    with pytest.raises(StoreError, match=told):
        train(files.settings(max_steps=4, tokens_per_step=1024, resume=True), quiet())


def test_deterministic_algorithms_are_used_for_the_run_alone(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = loop_module.Run._take_step
    used: list[bool] = []

    def take_step(self: Any) -> Any:
        used.append(torch.are_deterministic_algorithms_enabled())
        return take(self)

    monkeypatch.setattr(loop_module.Run, "_take_step", take_step)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = files.settings("deterministic", max_steps=2, deterministic=True)
    train(settings, quiet())
    assert used == [True, True]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    plain = files.settings("plain", max_steps=2)
    train(plain, quiet())
    assert used[2:] == [False, False]
    assert same(Path(settings.output), Path(plain.output)), "a CPU has no choice"


def test_placements_have_the_same_bits(files: Files) -> None:
    outputs = []
    for name, changes in {
        "roomy": {},
        "tight": {"device_memory": "3MiB", "micro_batch": 2},
        "two passes": {"clip_in_two_passes": True},
        "disk": {"device_memory": "3MiB", "host_memory": "1MiB", "disk": f"{files.folder}:64MiB"},
    }.items():
        settings = files.settings(name, **{"micro_batch": 2, **changes})
        try:
            train(settings, quiet())
        except DoesNotFit as error:
            pytest.fail(f"{name}: {error}")
        outputs.append(Path(settings.output))
    assert all(same(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("frozen_weights", [None, "int4"])
def test_adapters_in_pefts_format(files: Files, frozen_weights: str | None) -> None:
    peft = pytest.importorskip("peft")
    model_directory = write_model(files.folder / "model", hidden_size=128)
    settings = files.settings(
        model=str(model_directory),
        lora=True,
        lora_rank=4,
        max_steps=10,
        lr=1e-2,
        frozen_weights=frozen_weights,
    )
    train(settings, quiet())
    output = Path(settings.output)
    config = json.loads((output / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == model_directory
    base = AutoModelForCausalLM.from_pretrained(model_directory)
    model = peft.PeftModel.from_pretrained(base, output)
    moved = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert moved
    assert all(p.abs().max() > 0 for p in moved)
    taken = losses(output)
    assert sum(taken[-3:]) < sum(taken[:3])


def test_texts_and_epochs(files: Files) -> None:
    text = files.folder / "story.txt"
    text.write_text("the cat sat on the mat and said hello to the world. " * 40)
    settings = files.settings(data=(str(text),), max_steps=None, epochs=2)
    result = train(settings, quiet())
    assert result.num_steps == result.step > 2


@pytest.mark.parametrize("epochs", [None, 2, 0.5])
def test_an_epoch_has_every_row_once(
    files: Files, monkeypatch: pytest.MonkeyPatch, epochs: float | None
) -> None:
    """Also where a step is larger than all of the data, or does not divide it."""
    seen: list[Batch] = []
    values = NextToken.values

    def watched(self: NextToken, model: Any, batch: Batch, number: int) -> Any:
        seen.append(batch)
        return values(self, model, batch, number)

    monkeypatch.setattr(NextToken, "values", watched)
    settings = files.settings(
        max_steps=None, epochs=epochs, tokens_per_step=48 * 64, packing=False, lr=0.0
    )
    result = train(settings, quiet())
    rows = [tuple(row) for batch in seen for row in batch["input_ids"].tolist()]
    assert len(rows) == round(200 * (epochs or 1))
    times = Counter(rows[:200])
    assert set(times.values()) <= {1, 2}  # of 200 random rows, a few may be alike
    assert result.step == -(-len(rows) // 48)
    lines = read_metrics(Path(settings.output))
    tokens = [line["tokens_per_s"] * line["step_s"] for line in lines]
    assert tokens == pytest.approx([int(batch["attention_mask"].sum()) for batch in seen])


def test_rows_that_are_too_long_are_told(files: Files) -> None:
    rows = [{"messages": chat("hello " * 99, "x")}] * 3 + [{"messages": chat("x", "cat " * 99)}] * 2
    long = write_jsonl(files.folder / "long.jsonl", rows)
    told = io.StringIO()
    settings = files.settings(data=(str(files.data), str(long)), max_steps=1)
    train(settings, Display(Console(file=told, width=200)))
    assert "2 examples are cut after 64 tokens; 3 are left out" in told.getvalue()


def test_tools_that_the_template_leaves_out_are_told(files: Files) -> None:
    rows = [{"messages": chat("hello", "x"), "tools": [{"name": "add"}]}] * 2
    with_tools = write_jsonl(files.folder / "tools.jsonl", rows)
    told = io.StringIO()
    settings = files.settings(data=(str(files.data), str(with_tools)), max_steps=1)
    train(settings, Display(Console(file=told, width=200)))
    assert "the chat template leaves the tools of rows out: those of 2 rows" in told.getvalue()


def test_a_malformed_row_is_named(files: Files) -> None:
    bad = files.folder / "bad.jsonl"
    bad.write_text(files.data.read_text() + '{"messages": 3}\n')
    with pytest.raises(BadRow, match=r"bad\.jsonl"):
        train(files.settings(data=(str(bad),)), quiet())
    result = train(files.settings(data=(str(bad),), skip_bad_rows=True, max_steps=1), quiet())
    assert result.is_complete


def test_what_does_not_fit_is_refused_before_anything_is_loaded(files: Files) -> None:
    with pytest.raises(DoesNotFit, match="device needs"):
        train(files.settings(device_memory="100KiB"), quiet())


def test_a_step_is_one_line_where_nobody_watches() -> None:
    written = io.StringIO()
    Display(Console(file=written, width=40)).message("step 1/10  " + "loss 12.6646  " * 9)
    assert written.getvalue().count("\n") == 1


def test_plain_lines_and_the_live_display_tell_the_same(files: Files) -> None:
    plain = Console(record=True, width=160, force_terminal=False)
    train(files.settings("plain", log_every=2), Display(plain, log_every=2))
    told = plain.export_text()
    assert "step 6/6" in told
    assert "tokens/s" in told
    assert "home of" in told
    live = Console(record=True, width=160, force_terminal=True)
    train(files.settings("live"), LiveDisplay(live))
    shown = live.export_text()
    assert "6/6" in shown
    assert "lanes: compute" in shown
    assert same(files.folder / "plain", files.folder / "live")


def test_metrics_are_lines_of_json(files: Files) -> None:
    settings = files.settings(max_steps=3)
    train(settings, quiet())
    lines = (Path(settings.output) / "metrics.jsonl").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        values = json.loads(line)
        assert values["step"] == number
        assert {"loss", "grad_norm", "lr", "tokens_per_s", "tflops"} <= values.keys()


@pytest.mark.parametrize("has_end", [True, False])
def test_a_tokenizer_that_ends_nothing_is_told(
    files: Files, tmp_path: Path, *, has_end: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    tokenizer.chat_template = None
    if not has_end:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    console = Console(file=io.StringIO(), width=160)
    settings = files.settings(max_steps=1, tokenizer=str(tmp_path / "tokenizer"))
    train(settings, Display(console))
    told = "neither an end token nor a chat template" in console.file.getvalue()  # type: ignore[attr-defined]
    assert told is not has_end
