"""DPO: the loss, both kinds of reference, and that a model comes to prefer what was chosen."""

from __future__ import annotations

import errno
import io
import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers_made_here import write_jsonl
from torch import Tensor
from torch.nn import functional as F
from train_files import WORDS, Files
from transformers import AutoModelForCausalLM

import outcore
from outcore.data import durable_files
from outcore.engine.offload import engine_of
from outcore.errors import StoreError
from outcore.train import preference
from outcore.train.display import Display
from outcore.train.metrics import read_metrics
from outcore.train.preference import dpo_loss, evaluating, sequence_logps
from outcore.train.run import train


@pytest.fixture
def pairs(files: Files) -> Path:
    chosen = random.Random(0)
    rows = []
    for _ in range(80):
        words = chosen.choices(WORDS, k=4)
        rows.append(
            {
                "prompt": " ".join(words),
                "chosen": " ".join(sorted(words)),
                "rejected": " ".join(sorted(words, reverse=True)),
            }
        )
    return write_jsonl(files.folder / "pairs.jsonl", rows)


class Noting(Display):
    """Knows of which batches the reference was computed; ``at`` is called before each."""

    def __init__(self, at: Callable[[int], None] = lambda count: None) -> None:
        super().__init__(Console(quiet=True))
        self.referred: list[int] = []
        self._at = at

    def reference(self, number: int, total: int) -> None:
        self.referred.append(number)
        self._at(len(self.referred))


def reference_of(output: str, name: str = "reference") -> tuple[dict[str, str], Tensor]:
    with safe_open(Path(output) / f"{name}.safetensors", framework="pt") as file:
        return file.metadata(), file.get_tensor("logps")


def weights(output: str) -> bytes:
    return (Path(output) / "model.safetensors").read_bytes()


def losses(output: str, kind: str = "train") -> list[float]:
    return [line["loss"] for line in read_metrics(Path(output)) if line["kind"] == kind]


def test_the_loss_of_pairs() -> None:
    policy = torch.tensor([-1.0, -4.0, -3.0, -2.0])
    reference = torch.tensor([-2.0, -3.0, -2.0, -2.0])
    loss, *rewards = dpo_loss(policy, reference, beta=0.5)
    expected = -(F.logsigmoid(torch.tensor(1.0)) + F.logsigmoid(torch.tensor(-0.5))) / 2
    assert loss == pytest.approx(float(expected))
    accuracies, margins, chosen, rejected = rewards
    assert accuracies == 0.5
    assert (float(chosen), float(rejected)) == (0.0, -0.25)  # of 1, -1 and of -1, 0
    assert float(margins) == 0.25


def test_log_probabilities_and_their_gradients_are_those_of_plain_torch(files: Files) -> None:
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (4, 24))
    labels = ids.clone()
    labels[:, :9] = -100
    weight = torch.tensor([1.0, -2.0, 0.5, 0.0])
    plain = AutoModelForCausalLM.from_pretrained(files.model).eval()
    logps = F.log_softmax(plain(input_ids=ids).logits[:, :-1], -1)
    target = labels[:, 1:]
    expected = logps.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected = (expected * (target != -100)).sum(-1)
    (expected * weight).sum().backward()

    model = AutoModelForCausalLM.from_pretrained(files.model).eval()
    outcore.offload(model, device="cpu", weights="host", state="host")
    optimizer = outcore.AdamW(model, lr=1e-3, betas=(0.0, 0.95))
    found = sequence_logps(model, {"input_ids": ids, "labels": labels})
    assert torch.allclose(found, expected.detach(), rtol=1e-5)
    (found * weight).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    # Without memory the first moment is the gradient.
    for name, parameter in model.named_parameters():
        gradient = dict(plain.named_parameters())[name].grad
        moment = optimizer.state[parameter]["exp_avg"]
        assert torch.allclose(moment, gradient, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_comes_to_prefer_what_was_chosen(files: Files, pairs: Path, lora: bool) -> None:
    if lora:
        pytest.importorskip("peft")
    settings = files.settings(
        data=(str(pairs),),
        max_steps=30,
        lora=lora,
        lora_rank=4,
        lr=1e-2 if lora else 1e-3,
        dpo_beta=1.0,
        held_out=0.2,
        eval_every=10,
    )
    text = io.StringIO()
    result = train(settings, Display(Console(file=text, width=1000)))
    assert result.is_complete
    taken = losses(settings.output)
    # At the start the model is its own reference, and attention's dropout is left out.
    assert taken[0] == pytest.approx(math.log(2), abs=1e-4)
    assert sum(taken[-3:]) / 3 < 0.4
    assert losses(settings.output, "eval")[-1] < 0.6
    lines = read_metrics(Path(settings.output))
    assert not any("perplexity" in line for line in lines)  # a preference has none
    for line in lines:
        chosen, rejected = line["rewards/chosen"], line["rewards/rejected"]
        assert line["rewards/margins"] == pytest.approx(chosen - rejected, abs=1e-4)
    assert lines[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-3)
    for kind in ("train", "eval"):
        last = [line for line in lines if line["kind"] == kind][-1]
        assert last["rewards/accuracies"] >= 0.7
        assert last["rewards/margins"] > 0.5
    shown = [line for line in text.getvalue().splitlines() if "accuracy" in line]
    assert any(line.startswith("step 30/30") for line in shown)
    assert any("held-out loss" in line and "margin" in line for line in shown)
    assert "Reward accuracy" in (Path(settings.output) / "report.html").read_text()
    assert (Path(settings.output) / "reference.safetensors").exists() is not lora


def test_log_probabilities_of_bf16_are_not_rounded_to_it(files: Files) -> None:
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (2, 60))
    model = AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.bfloat16).eval()
    logps = F.log_softmax(model(input_ids=ids).logits[:, :-1].double(), -1)
    expected = logps.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)
    with torch.no_grad():
        found = sequence_logps(model, {"input_ids": ids, "labels": ids})
    assert torch.allclose(found.double(), expected, rtol=1e-6)


def test_an_evaluation_that_asks_for_its_reference_goes_on_as_it_was(files: Files) -> None:
    model = outcore.load(files.model, device="cpu", weights="host", state="host").train()
    with evaluating(model):
        with evaluating(model):
            pass
        assert engine_of(model).always_defers_logits
        assert not model.training
    assert not engine_of(model).always_defers_logits
    assert model.training


def test_a_step_has_both_sequences_of_each_pair(files: Files, pairs: Path) -> None:
    text = io.StringIO()
    settings = files.settings(data=(str(pairs),), max_steps=1)  # 256 tokens in sequences of 64
    train(settings, Display(Console(file=text, width=1000)))
    assert "1 steps of 4 × 64 tokens" in text.getvalue()


def test_a_stopped_run_keeps_its_reference(files: Files, pairs: Path) -> None:
    quiet = Display(Console(quiet=True))
    whole = files.settings("whole", data=(str(pairs),), schedule="constant")
    train(whole, quiet)
    cut = files.settings("cut", data=(str(pairs),), schedule="constant", save_every=3)
    train(cut, quiet)
    newest = Path(cut.output) / "checkpoints" / "step-000000006"
    newest.rename(newest.with_name("away"))  # as if it had been stopped after step 3
    resumed = train(
        files.settings("cut", data=(str(pairs),), schedule="constant", resume=True), quiet
    )
    assert resumed.is_complete
    assert losses(whole.output) == losses(cut.output)


def test_a_reference_whose_last_batch_was_smaller_is_made_again(files: Files, pairs: Path) -> None:
    quiet = Display(Console(quiet=True))
    changes: dict[str, object] = {"data": (str(pairs),), "schedule": "constant"}
    changes |= {"tokens_per_step": 6 * 64, "max_steps": None}
    whole = files.settings("whole", epochs=6 / 80, **changes)
    train(whole, quiet)
    train(files.settings("cut", epochs=4 / 80, save_every=1, **changes), quiet)  # 3 pairs, and 1
    newest = files.folder / "cut" / "checkpoints" / "step-000000002"
    newest.rename(newest.with_name("away"))  # as if it had been stopped after step 1
    cut = files.settings("cut", epochs=6 / 80, resume=True, **changes)
    display = Noting()
    train(cut, display)
    assert display.referred == [1], "the first batch is in the file"
    assert losses(whole.output) == losses(cut.output)


def test_the_reference_of_another_model_is_not_used(files: Files, pairs: Path) -> None:
    """A run that is killed before its end leaves its reference where another may begin."""
    quiet = Display(Console(quiet=True))
    settings = files.settings(data=(str(pairs),), max_steps=1, keep=0)
    train(settings, quiet)
    other = AutoModelForCausalLM.from_pretrained(files.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    other.save_pretrained(files.model)
    (Path(settings.output) / "config.json").unlink()  # as if it had not come to its end
    with pytest.warns(UserWarning, match="of another model or other data"):
        train(settings, quiet)
    first = files.settings("first", data=(str(pairs),), max_steps=1, keep=0)
    train(first, quiet)
    assert losses(settings.output) == losses(first.output)


def test_a_reference_that_was_damaged_is_made_again(files: Files, pairs: Path) -> None:
    quiet = Display(Console(quiet=True))
    changes: dict[str, object] = {"data": (str(pairs),), "schedule": "constant"}
    whole = files.settings("whole", **changes)
    train(whole, quiet)
    train(files.settings("cut", save_every=3, **changes), quiet)
    newest = files.folder / "cut" / "checkpoints" / "step-000000006"
    newest.rename(newest.with_name("away"))  # as if it had been stopped after step 3
    reference = files.folder / "cut" / "reference.safetensors"
    data = bytearray(reference.read_bytes())
    data[-2] ^= 0x40
    reference.write_bytes(data)
    cut = files.settings("cut", resume=True, **changes)
    with pytest.warns(UserWarning, match=r"reference\.safetensors is damaged.*computed anew"):
        train(cut, quiet)
    assert losses(whole.output) == losses(cut.output)


def test_a_full_disk_is_told_of_a_reference(
    files: Files, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = Display(Console(quiet=True))
    train(files.settings("first", data=(str(pairs),), max_steps=1), quiet)  # makes the cache

    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable_files, "write", full)
    with pytest.raises(StoreError, match=r"reference\.safetensors.*the disk is full"):
        train(files.settings(data=(str(pairs),), max_steps=1), quiet)


class Killed(Exception):
    pass


def killed_at(count: int) -> Callable[[int], None]:
    def kill(referred: int) -> None:
        if referred == count:
            raise Killed

    return kill


def stopped_at(count: int) -> Callable[[int], None]:
    def stop(referred: int) -> None:
        if referred == count:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


IN_BOTH = [3, 8]  # of 6 batches that are trained on, and 4 held out


@pytest.mark.parametrize("count", IN_BOTH)
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_killed_before_its_first_step_computes_no_batch_again(
    files: Files, pairs: Path, monkeypatch: pytest.MonkeyPatch, count: int, resume: bool
) -> None:
    changes: dict[str, object] = {"data": (str(pairs),), "held_out": 0.1}
    whole = files.settings("whole", **changes)
    undisturbed = Noting()
    train(whole, undisturbed)
    monkeypatch.setattr(preference, "_WRITE_EVERY_S", 0.0)
    with pytest.raises(Killed):
        train(files.settings("cut", **changes), Noting(killed_at(count)))
    cut = files.settings("cut", resume=resume, **changes)
    display = Noting()
    assert train(cut, display).is_complete
    assert display.referred == undisturbed.referred[count - 1 :]
    assert weights(cut.output) == weights(whole.output)
    for name in ("reference", "reference-held-out"):
        said, rows = reference_of(cut.output, name)
        of_whole, rows_of_whole = reference_of(whole.output, name)
        assert (said, rows.tolist()) == (of_whole, rows_of_whole.tolist())


@pytest.mark.parametrize("count", [*IN_BOTH, 6, 10])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_signal_before_the_first_step_finishes_the_batch(
    files: Files, pairs: Path, count: int, keep: int
) -> None:
    changes: dict[str, object] = {"data": (str(pairs),), "held_out": 0.1, "keep": keep}
    whole = files.settings("whole", **changes)
    undisturbed = Noting()
    train(whole, undisturbed)
    cut = files.settings("cut", **changes)
    display, before = Noting(stopped_at(count)), signal.getsignal(signal.SIGTERM)
    result = train(cut, display)
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(display.referred) == count
    assert (result.step, result.stopped_by, result.is_resumable) == (0, "SIGTERM", True)
    assert not result.is_prepared
    assert not result.is_complete
    assert "stopped by SIGTERM; --resume goes on" in (Path(cut.output) / "report.html").read_text()
    assert not (Path(cut.output) / "model.safetensors").exists()
    display = Noting()
    assert train(files.settings("cut", resume=True, **changes), display).is_complete
    assert display.referred == undisturbed.referred[count:]
    assert weights(cut.output) == weights(whole.output)


def test_a_longer_run_that_is_stopped_before_it_goes_on_is_where_it_was(
    files: Files, pairs: Path
) -> None:
    train(files.settings(data=(str(pairs),)), Noting())
    longer = files.settings(data=(str(pairs),), max_steps=9, resume=True)
    display = Noting(stopped_at(2))
    result = train(longer, display)
    assert (result.step, result.is_complete, display.referred) == (6, False, [6, 7])
    # Nor is one that has all its steps, and lost its reference.
    (Path(longer.output) / "reference.safetensors").unlink()
    result = train(files.settings(data=(str(pairs),), resume=True), Noting(stopped_at(1)))
    assert (result.step, result.stopped_by, result.is_complete) == (6, "SIGTERM", False)


def test_a_part_of_a_reference_that_was_damaged_is_made_again(files: Files, pairs: Path) -> None:
    whole = files.settings("whole", data=(str(pairs),))
    train(whole, Noting())
    cut = files.settings("cut", data=(str(pairs),), resume=True)
    train(cut, Noting(stopped_at(3)))
    path = Path(cut.output) / "reference.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40
    path.write_bytes(data)
    display = Noting()
    with pytest.warns(UserWarning, match=r"reference\.safetensors is damaged.*computed anew"):
        train(cut, display)
    assert display.referred == [0, 1, 2, 3, 4, 5]
    assert weights(cut.output) == weights(whole.output)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:-1],
        lambda rows: rows.reshape(2, -1),
        lambda rows: rows.bfloat16(),
        lambda rows: rows[0],
    ],
)
def test_a_reference_of_another_form_is_made_again(
    files: Files, pairs: Path, change: Callable[[Tensor], Tensor]
) -> None:
    settings = files.settings(data=(str(pairs),), keep=0)
    train(settings, Noting())
    said, rows = reference_of(settings.output)
    save_file({"logps": change(rows)}, Path(settings.output) / "reference.safetensors", said)
    (Path(settings.output) / "config.json").unlink()  # as if it had not come to its end
    display = Noting()
    with pytest.warns(UserWarning, match="computed anew"):
        train(settings, display)
    assert display.referred == [0, 1, 2, 3, 4, 5]
    assert torch.equal(reference_of(settings.output)[1], rows)


def test_a_signal_while_a_whole_reference_is_read_is_not_lost(
    files: Files, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(files.settings(data=(str(pairs),)), Noting())
    read = preference._read

    def stopped(*arguments: Any) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(*arguments)

    monkeypatch.setattr(preference, "_read", stopped)
    result = train(files.settings(data=(str(pairs),), resume=True), Noting())
    assert not result.is_prepared
    assert (result.step, result.stopped_by) == (6, "SIGTERM")
