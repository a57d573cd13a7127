"""A Trainer's run goes on from a checkpoint to the same bits, and reads no pickle on the way."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from trainer_runs import (
    assert_same_bits,
    assert_same_curve,
    gpt2,
    llama,
    logged,
    lora,
    rows,
    run,
    state,
)
from transformers import MixtralConfig, MixtralForCausalLM

import outcore
from outcore.errors import StoreError
from outcore.hf import Trainer
from outcore.hf.plain_values import from_plain, to_plain

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 7}

# 48 rows in batches of 4: an epoch is 12 batches.
RUNS: dict[str, dict[str, Any]] = {
    "within an epoch": {},
    "at the end of an epoch": {"per_device_train_batch_size": 16},
    "in the second epoch": {"per_device_train_batch_size": 24},
    "accumulated": {
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    },
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1, "mode": "max"},
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "with workers": {"dataloader_num_workers": 1},
}


@pytest.mark.parametrize("name", RUNS)
def test_resumes_to_the_same_bits(tmp_path: Path, name: str) -> None:
    whole = run(Trainer, tmp_path, model=gpt2(), **SAVING, **RUNS[name])
    forget_after(3, tmp_path)
    resumed = run(Trainer, tmp_path, model=other_values(), resume=True, **SAVING, **RUNS[name])
    assert_same_bits(state(resumed), state(whole))
    assert logged(resumed) == logged(whole)


class DrawnAtItsStart(torch.utils.data.Sampler[int]):
    """As the sampler that groups rows by length: an epoch's order is of the global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())

    def __len__(self) -> int:
        return len(rows())


class DrawingTrainer(Trainer):
    def _get_train_sampler(self, *_: Any) -> DrawnAtItsStart:
        return DrawnAtItsStart()


@pytest.mark.parametrize("batch_size", [4, 16], ids=["within an epoch", "at the end of an epoch"])
def test_an_order_that_is_drawn_when_an_epoch_starts_is_drawn_again(
    tmp_path: Path, batch_size: int
) -> None:
    more = {**SAVING, "per_device_train_batch_size": batch_size}
    whole = run(DrawingTrainer, tmp_path, model=gpt2(), **more)
    forget_after(3, tmp_path)
    resumed = run(DrawingTrainer, tmp_path, model=other_values(), resume=True, **more)
    assert_same_bits(state(resumed), state(whole))
    assert logged(resumed) == logged(whole)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A run that went to its end: its folder, and what it ended with."""
    folder = tmp_path_factory.mktemp("finished")
    trainer = run(Trainer, folder, **SAVING)
    found = state(trainer)
    outcore.release(trainer.model)
    return folder, found


@pytest.fixture
def copied(finished: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """A copy of its folder, to do harm to."""
    return Path(shutil.copytree(finished[0], tmp_path / "copied"))


def test_a_checkpoint_that_was_written_is_not_held_open(
    finished: tuple[Path, dict[str, Tensor]],
) -> None:
    folder = str(finished[0])
    assert list(finished[0].glob("checkpoint-*/outcore/.lock"))
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert [link for link in links if link.startswith(folder)] == []


def forget_after(step: int, folder: Path) -> None:
    """Be where the run was killed before its next checkpoint; a run saves its last step too."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)


def other_values() -> Any:
    """The same model with other values: what is not restored shows."""
    model = gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def test_resumes_in_another_placement(tmp_path: Path) -> None:
    first: dict[str, Any] = {"weights": "host", "state": "host"}
    later: dict[str, Any] = {"weights": "disk", "state": "disk", "disk": str(tmp_path)}
    whole = run(Trainer, tmp_path, model=gpt2(), more={"offload": first}, **SAVING)
    resumed = run(
        Trainer,
        tmp_path,
        model=other_values(),
        resume=str(tmp_path / "checkpoint-3"),
        more={"offload": later},
        **SAVING,
    )
    assert_same_bits(state(resumed), state(whole))


def mixtral() -> Any:
    """Its files have other names than its parameters, which transformers puts together."""
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            attention_dropout=0.1,
        )
    )


def resumed_and_whole(folder: Path, make: Any, **options: Any) -> tuple[Any, Any]:
    """Run to the end; then from the first checkpoint, with a model of other values."""
    whole = run(Trainer, folder, model=make(), **options)
    forget_after(3, folder)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return run(Trainer, folder, model=model, resume=True, **options), whole


def test_a_mixture_of_experts_resumes_too(tmp_path: Path) -> None:
    resumed, whole = resumed_and_whole(tmp_path, mixtral, **SAVING)
    assert_same_bits(state(resumed), state(whole))


@pytest.mark.gpu
def test_bf16_resumes_with_its_master(tmp_path: Path) -> None:
    """On a GPU only: not every CPU has torch's bf16."""
    options: dict[str, Any] = {"use_cpu": False, "bf16": True, "full_determinism": True}
    more = {"offload": {"weights": "host", "state": "host", "compile": False}}
    resumed, whole = resumed_and_whole(tmp_path, gpt2, more=more, **options, **SAVING)
    assert outcore.engine_of(whole.model).options.dtype == torch.bfloat16
    assert any("remainder" in name for name in state(whole))
    assert_same_bits(state(resumed), state(whole))


def test_no_pickle_is_read(
    copied: Path,
    finished: tuple[Path, dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {path.name for path in (copied / "checkpoint-3").rglob("*") if path.is_file()}
    assert not names & {"optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"}
    assert {"model.safetensors", "config.json", "trainer_state.json", "manifest.json"} <= names

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was read")

    readers = ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"))
    for module, name in readers:
        monkeypatch.setattr(module, name, refuse)
    resumed = run(Trainer, copied, resume=str(copied / "checkpoint-3"), **SAVING)
    monkeypatch.undo()
    assert_same_bits(state(resumed), finished[1])


@pytest.mark.parametrize(
    "harm", ["flipped bit", "no trainer state", "half a trainer state", "empty"]
)
def test_a_harmed_checkpoint_gives_way_to_the_one_before(
    copied: Path, finished: tuple[Path, dict[str, Tensor]], harm: str
) -> None:
    forget_after(6, copied)
    newest = copied / "checkpoint-6"
    if harm == "flipped bit":
        path = sorted(newest.rglob("unit-*.safetensors"))[1]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif harm == "no trainer state":
        (newest / "trainer_state.json").unlink()
    elif harm == "half a trainer state":
        text = (newest / "trainer_state.json").read_text()
        (newest / "trainer_state.json").write_text(text[: len(text) // 2])
    else:
        shutil.rmtree(newest)
        newest.mkdir()
    with pytest.warns(UserWarning, match="checkpoint-6 cannot be used"):
        resumed = run(Trainer, copied, resume=True, **SAVING)
    assert resumed._checked_checkpoint == str(copied / "checkpoint-3")
    assert_same_bits(state(resumed), finished[1])


def test_a_harmed_checkpoint_that_is_named_is_refused(copied: Path) -> None:
    path = next((copied / "checkpoint-3").rglob("unit-00001.safetensors"))
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(StoreError, match="unit-00001"):
        run(Trainer, copied, resume=str(copied / "checkpoint-3"), **SAVING)


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint"):
        run(Trainer, tmp_path / "none", resume=True)


def test_with_unfinished_checkpoints_alone_there_is_neither(copied: Path) -> None:
    for path in copied.glob("checkpoint-*/trainer_state.json"):
        path.unlink()
    with (
        pytest.warns(UserWarning, match="cannot be used"),
        pytest.raises(ValueError, match="No valid checkpoint"),
    ):
        run(Trainer, copied, resume=True, **SAVING)


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    run(transformers.Trainer, tmp_path, **SAVING)
    with pytest.raises(ValueError, match=r"optimizer\.pt.*from_pretrained"):
        run(Trainer, tmp_path, resume=str(tmp_path / "checkpoint-3"), **SAVING)


def test_another_model_is_refused(copied: Path) -> None:
    with pytest.raises(StoreError, match="of another model"):
        run(Trainer, copied, model=gpt2(), resume=True, **SAVING)


@pytest.mark.parametrize("make", [llama, lora])
def test_weights_alone(tmp_path: Path, make: Any) -> None:
    """As transformers does with save_only_model: the weights go on, the optimizer starts anew."""
    curves = []
    for kind in (transformers.Trainer, Trainer):
        folder = tmp_path / kind.__module__
        run(kind, folder, model=make(), save_only_model=True, **SAVING)
        forget_after(3, folder)
        assert not (folder / "checkpoint-3" / "outcore").exists()
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
        curves.append(run(kind, folder, model=model, resume=True, save_only_model=True, **SAVING))
    assert_same_curve(curves[1], curves[0])


@pytest.mark.parametrize("save_only_model", [False, True])
@pytest.mark.parametrize("make", [llama, lora])
def test_the_best_model_at_the_end(tmp_path: Path, make: Any, save_only_model: bool) -> None:
    trainer = run(
        Trainer,
        tmp_path,
        model=make(),
        learning_rate=3.0,  # everything after the first evaluation is worse
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        save_only_model=save_only_model,
    )
    losses = {step: value for step, name, value in logged(trainer) if name == "eval_loss"}
    assert losses[trainer.state.best_global_step] == min(losses.values()) < losses[4]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-5)


def test_limits_on_the_number_of_checkpoints(tmp_path: Path) -> None:
    run(Trainer, tmp_path, **{**SAVING, "save_steps": 1, "max_steps": 4}, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]


def test_lora_resumes_without_its_base(tmp_path: Path) -> None:
    whole = run(Trainer, tmp_path, model=lora(), **SAVING)
    tensors = [
        entry["name"]
        for path in (tmp_path / "checkpoint-3").rglob("manifest.json")
        for file in json.loads(path.read_text())["files"]
        for entry in file["tensors"]
    ]
    assert any("lora_A" in name for name in tensors)
    assert not any("base_layer" in name or "embed_tokens" in name for name in tensors)
    forget_after(3, tmp_path)
    model = lora()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    resumed = run(Trainer, tmp_path, model=model, resume=True, **SAVING)
    assert_same_bits(state(resumed), state(whole))


def test_training_twice_goes_on_with_the_same_model(tmp_path: Path) -> None:
    curves = []
    for kind in (transformers.Trainer, Trainer):
        trainer = run(kind, tmp_path / kind.__module__)
        trainer.train()
        curves.append(trainer)
    assert_same_curve(curves[1], curves[0])


def test_weights_of_an_optimizer_in_the_past_are_gone(tmp_path: Path) -> None:
    """Resuming into a trainer that has trained already leaves nothing of what it did."""
    whole = run(Trainer, tmp_path, model=gpt2(), **SAVING)
    expected = state(whole)
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_bits(state(whole), expected)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        float("-inf"),
        "text",
        [1, [2.5]],
        (1, 2),
        {"a": (1, {"b": [None]})},
        {1: 2, "a": 3},
        {"$": 1},
        Counter({3: 1, 7: 2}),
        {1, 2},
    ],
    ids=repr,
)
def test_scheduler_values_survive_json(value: Any) -> None:
    found = from_plain(json.loads(json.dumps(to_plain(value, "it"), allow_nan=False)))
    assert found == value
    assert type(found) is type(value)


def test_scheduler_values_that_only_a_pickle_holds_are_named() -> None:
    with pytest.raises(ValueError, match=r"the state\.a\[1\] is object"):
        to_plain({"a": [1, object()]}, "the state")
    assert to_plain(torch.tensor(2.5), "it") == 2.5


def test_the_model_saved_with_a_checkpoint_is_the_runs(
    finished: tuple[Path, dict[str, Tensor]],
) -> None:
    again = outcore.load(finished[0] / "checkpoint-7", device="cpu")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, finished[1][name]), name
