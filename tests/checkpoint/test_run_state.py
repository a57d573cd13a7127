"""A run goes on from a checkpoint to the same bits, in the same placement or in another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import ALL_PLACEMENTS, CONFIG, PLACEMENTS, Run, assert_same
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.checkpoint import run_state
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import read_manifest
from outcore.errors import StoreError


@pytest.mark.parametrize("later", PLACEMENTS, ids=str)
@pytest.mark.parametrize("first", PLACEMENTS[:2] + PLACEMENTS[4:], ids=str)
def test_a_run_goes_on_to_the_same_bits(
    tmp_path: Path, first: dict[str, Any], later: dict[str, Any]
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
    assert other.load(folder) == 3
    other.train(3)
    assert other.losses == losses
    assert_same(other.tensors(), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("placement", ALL_PLACEMENTS, ids=str)
def test_what_was_written_since_the_last_step_is_in_it(
    tmp_path: Path, placement: dict[str, Any], is_async: bool, dtype: str
) -> None:
    """No forward or step has seen it: masters and records on disk are those from before."""
    folder, disk = CheckpointFolder(tmp_path / "checkpoints"), tmp_path / "scratch"
    disk.mkdir()
    run = Run(disk, dtype=dtype, **placement)
    checkpoints = AsyncCheckpoints(folder, run.model, run.optimizer, while_training=is_async)
    run.train(2)
    outcore.synchronize(run.model)
    first, second = (run.model.transformer.h[i].mlp.c_fc.weight for i in (0, 1))
    with torch.no_grad():
        first.mul_(0.3)
    run.optimizer.state[first]["exp_avg_sq"].mul_(0.5)
    state = run.optimizer.state[second]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    checkpoints.begin(run.values())
    checkpoints.close()
    run.train(2)
    expected, losses = run.tensors(), run.losses[2:]

    other = Run(disk, seed=9, dtype=dtype, **placement)
    assert other.load(folder) == 2
    other.train(2)
    assert other.losses == losses
    assert_same(other.tensors(), expected)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_packed_base_is_recognized_in_every_home(tmp_path: Path, format: str) -> None:
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
        other, its_optimizer = make(0, weights)
        assert run_state.load(folder, other, its_optimizer) is not None
        with torch.no_grad():
            assert torch.equal(other.eval()(ids).logits, first.eval()(ids).logits)
    stranger, its_optimizer = make(7, "host")
    with pytest.raises(StoreError, match="other frozen weights"):
        run_state.load(folder, stranger, its_optimizer)


def test_another_model_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
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


def test_a_harmed_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    run = Run(tmp_path, weights="host", state="host")
    run.train(1)
    run.save(folder)
    run.train(1)
    path = run.save(folder) / "unit-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"unit-00002.*step-000000001 is used"):
        assert run.load(folder) == 1


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    run = Run(tmp_path, weights="host", state="host")
    assert run_state.load(CheckpointFolder(tmp_path / "none"), run.model, run.optimizer) is None


def test_the_generators_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    run = Run(tmp_path, weights="host", state="host")
    run.save(folder)
    drawn = [torch.rand(2).tolist(), random.random(), float(np.random.rand())]
    run_state.load_random(folder)
    assert [torch.rand(2).tolist(), random.random(), float(np.random.rand())] == drawn


@pytest.fixture
def plain_bf16() -> Iterator[None]:
    # Without oneDNN: its AMX kernels are illegal instructions in some sandboxes.
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def test_every_state_format_goes_on_to_the_same_bits(tmp_path: Path, plain_bf16: None) -> None:
    for state_format in ("fp32", "compact", "minimal"):
        folder = CheckpointFolder(tmp_path / state_format)
        options = {"dtype": torch.bfloat16, "state_format": state_format}
        run = Run(tmp_path, weights="host", state="host", **options)
        run.train(2)
        run.save(folder)
        run.train(1)
        other = Run(tmp_path, seed=9, weights="device", state="device", **options)
        assert other.load(folder) == 2
        other.train(1)
        assert other.losses == run.losses[2:]
        assert_same(other.tensors(), run.tensors())


def lora_run(seed: int) -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    base = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1)
    model = outcore.offload(peft.get_peft_model(base, config), device="cpu")
    return model, outcore.AdamW(model, lr=1e-2)


def test_frozen_weights_are_not_in_it_but_are_recognized(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    model, optimizer = lora_run(seed=0)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    directory = run_state.save(folder, model, optimizer, {})
    names = [e.name for file in read_manifest(directory).files for e in file.tensors]
    names.remove("torch")
    assert names
    assert all("lora_" in name for name in names)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    other, its_optimizer = lora_run(seed=0)
    assert run_state.load(folder, other, its_optimizer) is not None
    assert_same(other.state_dict(), expected)
    stranger, its_optimizer = lora_run(seed=5)
    with pytest.raises(StoreError, match="other frozen weights"):
        run_state.load(folder, stranger, its_optimizer)


def test_an_lr_that_is_a_tensor_goes_on_as_one(tmp_path: Path) -> None:
    """A scheduler that multiplies it rounds to the tensor's type."""

    def start() -> Run:
        run = Run(tmp_path, weights="host", state="host")
        run.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        run.schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        return run

    first = start()
    first.train(2)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    first.save(folder)
    first.train(3)
    second = start()
    assert second.load(folder) == 2
    assert isinstance(second.optimizer.param_groups[0]["lr"], torch.Tensor)
    second.train(3)
    assert_same(second.tensors(), first.tensors())
