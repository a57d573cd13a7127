"""A run goes on from a checkpoint to the same bits, in the same placement or in another."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import read_manifest
from outcore.errors import StoreError

CONFIG: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
    "vocab_size": 61,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
PLACEMENTS: list[dict[str, Any]] = [
    {"weights": "host", "state": "host", "num_visits": 3},
    {"weights": "device", "state": "device"},
    {"weights": "device", "state": "host"},
    {"weights": "disk", "state": "disk"},
    {"weights": ["disk", "host", "device"], "state": ["disk", "host", "device"]},
]


class Run:
    """A tiny model with dropout, a schedule and data that is drawn as it goes."""

    def __init__(self, disk: Path, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
        self.model = outcore.offload(model, device="cpu", disk=str(disk), **options)
        self.optimizer = outcore.AdamW(self.model, lr=1e-2, max_grad_norm=1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = torch.randint(0, 41, (2, 8)) + random.randrange(10) + int(np.random.randint(10))
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.losses.append(float(loss.detach()))

    def tensors(self) -> dict[str, Tensor]:
        found = {n: t.clone() for n, t in self.model.state_dict().items()}
        state = self.optimizer.state_dict()["state"]
        found |= {f"{i}.{k}": v.clone() for i, e in state.items() for k, v in e.items()}
        return found

    def save(self, folder: CheckpointFolder) -> Path:
        values = {"schedule": self.schedule.state_dict()["last_epoch"]}
        return run_state.save(folder, self.model, self.optimizer, values)


@pytest.mark.parametrize("later", PLACEMENTS, ids=str)
@pytest.mark.parametrize("first", PLACEMENTS[:2] + PLACEMENTS[4:], ids=str)
def test_a_run_goes_on_to_the_same_bits(
    tmp_path: Path, first: dict[str, Any], later: dict[str, Any], closed_engines: None
) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    disk = tmp_path / "scratch"
    disk.mkdir()
    run = Run(disk, **first)
    run.train(3)
    run.save(folder)
    run.train(3)
    expected, losses = run.tensors(), run.losses[3:]

    other = Run(disk, seed=9, **later)
    other.train(1)  # whatever it did before is gone
    resumed = run_state.load(folder, other.model, other.optimizer)
    assert resumed is not None
    assert resumed.step == 3
    assert resumed.values == {"schedule": 3}
    other.schedule.last_epoch = resumed.values["schedule"]
    other.losses.clear()
    other.train(3)
    assert other.losses == losses
    found = other.tensors()
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_packed_base_goes_over_as_it_is(
    tmp_path: Path, format: str, closed_engines: None
) -> None:
    """Packed again from expanded values in bf16, int8 would not be the same."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    options = {"frozen_weights": format, "dtype": torch.float32, "disk": str(tmp_path)}

    def make(seed: int, weights: str) -> tuple[Any, outcore.AdamW]:
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(**{**CONFIG, "n_embd": 64})).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        model = outcore.offload(model, device="cpu", weights=weights, **options)
        return model, outcore.AdamW(model, lr=1e-2)

    first, optimizer = make(0, "host")
    ids = torch.arange(16).view(2, 8)
    first(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    run_state.save(folder, first, optimizer, {})
    for weights in ("host", "device", "disk"):
        other, its_optimizer = make(7, weights)
        assert run_state.load(folder, other, its_optimizer) is not None
        expected, found = first.state_dict(), other.state_dict()
        assert [n for n in expected if not torch.equal(found[n] * 1, expected[n] * 1)] == []
        with torch.no_grad():
            assert torch.equal(other.eval()(ids).logits, first.eval()(ids).logits)


def test_another_model_is_refused_and_left_as_it_is(tmp_path: Path, closed_engines: None) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    run = Run(tmp_path, weights="host", state="host")
    run.train(1)
    run.save(folder)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**CONFIG, "n_layer": 2})).train()
    model = outcore.offload(model, device="cpu")
    optimizer = outcore.AdamW(model, lr=1e-2)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(StoreError, match="of another model"):
        run_state.load(folder, model, optimizer)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_a_harmed_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, closed_engines: None
) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    run = Run(tmp_path, weights="host", state="host")
    run.train(1)
    run.save(folder)
    run.train(1)
    path = run.save(folder) / "unit-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    resumed = run_state.load(folder, run.model, run.optimizer)
    assert resumed is not None
    assert resumed.step == 1


def test_without_a_checkpoint_there_is_nothing_to_resume(
    tmp_path: Path, closed_engines: None
) -> None:
    run = Run(tmp_path, weights="host", state="host")
    assert run_state.load(CheckpointFolder(tmp_path / "none"), run.model, run.optimizer) is None


def test_frozen_weights_can_stay_out(tmp_path: Path, closed_engines: None) -> None:
    class Frozen(Run):
        def __init__(self, disk: Path, seed: int = 0, **options: Any) -> None:
            torch.manual_seed(0)  # what is frozen is the same model's
            model = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("mlp" in name)
            self.model = outcore.offload(model, device="cpu", disk=str(disk), **options)
            self.optimizer = outcore.AdamW(self.model, lr=1e-2)
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
            self.losses = []

    folder = CheckpointFolder(tmp_path / "checkpoints")
    run = Frozen(tmp_path, weights="host", state="host")
    run.train(2)
    directory = run_state.save(folder, run.model, run.optimizer, {}, with_frozen=False)
    names = [entry.name for file in read_manifest(directory).files for entry in file.tensors]
    assert any(".mlp." in name for name in names)
    assert not any(".attn." in name or "wte" in name for name in names)
    assert run_state.check(folder) == 2
    run.train(2)
    other = Frozen(tmp_path, weights="device", state="host")
    other.train(1)
    resumed = run_state.load(
        folder, other.model, other.optimizer, with_frozen=False, is_checked=True
    )
    assert resumed is not None
    other.train(2)
    assert other.losses[1:] == run.losses[2:]
    found, expected = other.tensors(), run.tensors()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
    with pytest.raises(StoreError, match="not there"):  # whole, it was never
        run_state.load(folder, other.model, other.optimizer)


def test_the_generators_alone(tmp_path: Path, closed_engines: None) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    run = Run(tmp_path, weights="host", state="host")
    run.save(folder)
    drawn = [torch.rand(2).tolist(), random.random(), float(np.random.rand())]
    run_state.load_random(folder)
    assert [torch.rand(2).tolist(), random.random(), float(np.random.rand())] == drawn
