"""Blocks whose weights or state live on disk: the same results, true views, clear errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cufile_on_host import CufileOnHost
from families import BY_NAME
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.engine import disk_tier
from outcore.errors import LaneError, StoreError
from outcore.store.scratch_file import ScratchFile
from outcore.stream.disk_tensors import PIECE_ALIGN, DiskTensors
from outcore.stream.lanes import injected_delays
from outcore.stream.unit import Unit

BOTH = {"weights": "disk", "state": "disk"}


def make(disk: Path | None, **options: Any) -> Any:
    model = BY_NAME["llama"].make().train()
    return outcore.offload(model, device="cpu", disk=None if disk is None else str(disk), **options)


def loss_of(model: Any, seed: int) -> Tensor:
    ids = torch.randint(0, 90, (4, 8), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scratch_file(disk: Path, name: str) -> Path:
    (path,) = disk.glob(f"*/{name}.scratch")
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"state": "disk"},
        {"weights": "disk"},
        BOTH,
        {"weights": "device", "state": "disk"},
        {"weights": ["disk", "host", "device"], "state": ["host", "disk", "disk"]},
    ],
    ids=["state", "weights", "both", "resident", "mixed"],
)
@pytest.mark.parametrize("passing", [False, True])
def test_the_same_losses_and_state(disk: Path, options: dict[str, Any], passing: bool) -> None:
    def run(disk: Path | None, **options: Any) -> tuple[list[float], dict[Any, Tensor]]:
        model = make(disk, **options)
        optimizer = outcore.AdamW(model, lr=1e-2, update_during_backward=passing)
        losses = train(model, optimizer, range(4))
        tensors: dict[Any, Tensor] = {k: v.clone() for k, v in model.state_dict().items()}
        for index, entry in optimizer.state_dict()["state"].items():
            tensors |= {(index, name): value.clone() for name, value in entry.items()}
        outcore.release(model)
        return losses, tensors

    losses, tensors = run(None)
    found_losses, found = run(disk, **options)
    assert found_losses == losses
    assert [name for name in tensors if not torch.equal(tensors[name], found[name])] == []


def test_blocks_of_several_pieces(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
    )

    def run(**options: Any) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        model = outcore.offload(model, device="cpu", **options)
        optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
        losses = train(model, optimizer, range(3))
        weights = [parameter.detach().clone() for parameter in model.state_dict().values()]
        outcore.release(model)
        return losses, weights

    losses, weights = run()
    monkeypatch.setattr(Unit, "piece_numel", lambda *_: PIECE_ALIGN)
    found_losses, found = run(disk=str(disk), **BOTH)
    assert found_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, found, strict=True))


def test_saving_and_resuming(disk: Path, tmp_path: Path) -> None:
    model = make(disk, **BOTH)
    optimizer = outcore.AdamW(model, lr=1e-2)
    train(model, optimizer, range(2))
    model.save_pretrained(tmp_path / "saved")
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: tensor.clone() for name, tensor in entry.items()}
        for index, entry in state["state"].items()
    }
    expected = train(model, optimizer, range(2, 5))
    outcore.release(model)
    del model, optimizer
    model = outcore.load(tmp_path / "saved", device="cpu", disk=str(disk), **BOTH).train()
    model.set_attn_implementation("eager")  # as the first model's
    optimizer = outcore.AdamW(model, lr=1e-2)
    optimizer.load_state_dict(state)
    assert train(model, optimizer, range(2, 5)) == expected
    outcore.release(model)


def test_parameters_can_be_read_and_written(disk: Path) -> None:
    def run(disk: Path | None, **options: Any) -> list[float]:
        model = make(disk, **options)
        optimizer = outcore.AdamW(model, lr=1e-2)
        losses = train(model, optimizer, range(2))
        outcore.synchronize(model)
        weight = model.model.layers[1].mlp.up_proj.weight
        losses.append(float(weight.detach().double().sum()))
        with torch.no_grad():
            weight.mul_(0.5)
        losses += train(model, optimizer, range(2, 4))
        outcore.release(model)
        return losses

    assert run(None) == run(disk, **BOTH)


def test_frozen_blocks_have_weights_on_disk_and_no_state(disk: Path) -> None:
    def run(disk: Path | None, **options: Any) -> list[float]:
        model = BY_NAME["llama"].make().train()
        for parameter in model.model.layers[0].parameters():
            parameter.requires_grad = False
        model.model.layers[1].mlp.requires_grad_(False)
        model = outcore.offload(
            model, device="cpu", disk=None if disk is None else str(disk), **options
        )
        optimizer = outcore.AdamW(model, lr=1e-2)
        losses = train(model, optimizer, range(3))
        outcore.release(model)
        return losses

    assert run(None) == run(disk, **BOTH)


def test_a_directory_and_room_are_needed(disk: Path, tmp_path: Path) -> None:
    model = BY_NAME["llama"].make()
    with pytest.raises(ValueError, match=r'disk="/mnt/nvme:500GiB"'):
        outcore.offload(model, device="cpu", **BOTH)
    with pytest.raises(ValueError, match="not a directory"):
        outcore.offload(model, device="cpu", disk=str(tmp_path / "none") + ":1GiB", **BOTH)
    with pytest.raises(outcore.OutOfBudget, match="scratch weights"):
        outcore.offload(model, device="cpu", disk=f"{disk}:8KiB", **BOTH)
    with pytest.raises(ValueError, match=r'weights="disk" with state="device"'):
        outcore.offload(model, device="cpu", disk=str(disk), weights="disk", state="device")
    outcore.release(outcore.offload(model, device="cpu"))


def harm(path: Path, fault: str) -> None:
    if fault == "deleted":
        path.unlink()
    elif fault == "cut":
        os.truncate(path, 4096)
    else:
        with path.open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 4]))
            file.flush()
            os.fsync(file.fileno())


def says_where(error: StoreError, path: Path) -> None:
    """See that it does in its text too, and once."""
    assert (error.path, type(error.offset)) == (path, int)
    assert str(error).count(str(path)) == 1
    assert str(error).count("background work failed") <= 1


@pytest.mark.parametrize("name", ["weights", "state"])
@pytest.mark.parametrize("fault", ["deleted", "cut", "flipped"])
def test_a_file_that_is_harmed_ends_the_step_with_its_name(
    disk: Path, name: str, fault: str
) -> None:
    model = make(disk, **BOTH)
    optimizer = outcore.AdamW(model, lr=1e-2)
    train(model, optimizer, range(2))
    outcore.synchronize(model)
    path = scratch_file(disk, name)
    harm(path, fault)

    def go_on() -> None:
        train(model, optimizer, range(2, 6))
        outcore.synchronize(model)

    with pytest.raises(StoreError) as caught:
        go_on()
    assert isinstance(caught.value, LaneError)
    assert type(caught.value.__cause__) is StoreError
    says_where(caught.value, path)
    outcore.engine_of(model).close()


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("fault", ["deleted", "cut", "flipped"])
def test_weights_that_a_pass_could_not_read_are_told_by_synchronize(
    disk: Path, fault: str, is_backward: bool
) -> None:
    model = make(disk, num_slots=1, **BOTH)  # so that no weights are on the device already
    optimizer = outcore.AdamW(model, lr=1e-2)
    train(model, optimizer, range(1))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    path = scratch_file(disk, "weights")
    loss = loss_of(model, 1)
    go_on: Callable[[], object] = loss.backward if is_backward else lambda: loss_of(model, 2)
    harm(path, fault)
    with pytest.raises(StoreError) as met:
        go_on()
    says_where(met.value, path)
    optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            outcore.synchronize(model)
        says_where(caught.value, path)
    if fault == "flipped":  # the file is there to be written to
        model.load_state_dict(whole)
        outcore.synchronize(model)
        train(model, optimizer, range(1, 2))
        outcore.release(model)
    else:
        outcore.engine_of(model).close()


def test_weights_that_could_not_be_read_once_are_forgotten_when_they_can(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StoreError("the drive failed")

    model = make(disk, num_slots=1, weights="disk")
    optimizer = outcore.AdamW(model, lr=1e-2)
    train(model, optimizer, range(1))
    outcore.synchronize(model)
    with monkeypatch.context() as patched:
        patched.setattr(ScratchFile, "read_all", fail)
        with pytest.raises(StoreError, match="the drive failed"):
            loss_of(model, 1)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(0.5)  # a user's own write is no harm
    outcore.synchronize(model)
    monkeypatch.setattr(ScratchFile, "check", fail)  # what costs a reading is over
    outcore.synchronize(model)
    train(model, optimizer, range(1, 2))
    outcore.engine_of(model).close()


@pytest.mark.parametrize("options", [{"state": "disk"}, BOTH], ids=["state", "both"])
def test_a_second_step_reads_what_the_first_wrote(disk: Path, options: dict[str, Any]) -> None:
    """Fewer chunks on disk than are read ahead: the next update of one must not overtake it."""

    def run(disk: Path | None, **options: Any) -> list[Tensor]:
        homes = {name: [home, home, "host"] for name, home in options.items()}
        model = make(disk, **homes)
        optimizer = outcore.AdamW(model, lr=1e-2)
        loss_of(model, 0).backward()
        with injected_delays(0.01, seed=0):
            optimizer.step()
            optimizer.step()
            outcore.synchronize(model)
        found = [tensor.clone() for tensor in model.state_dict().values()]
        for entry in optimizer.state_dict()["state"].values():
            found += [value.clone() for value in entry.values()]
        outcore.release(model)
        return found

    assert all(map(torch.equal, run(disk, **options), run(None)))


def test_a_few_resident_blocks_do_not_run_out_of_staging(disk: Path) -> None:
    """Their master is a third tensor on disk; the other blocks have two."""
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = outcore.offload(
        LlamaForCausalLM(config).train(),
        device="cpu",
        disk=str(disk),
        weights=["device"] * 3 + ["host"] * 4,
        state="disk",
    )
    optimizer = outcore.AdamW(model, lr=1e-2)
    with injected_delays(0.01, seed=0):
        train(model, optimizer, range(2))
        outcore.synchronize(model)
    outcore.release(model)


def test_an_update_that_cannot_be_read_whole_keeps_no_staging_buffer(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and state are in two files, and the second one cannot be read."""
    model = make(disk, weights="disk", state="disk")
    optimizer = outcore.AdamW(model, lr=1e-2)
    train(model, optimizer, range(1))
    outcore.synchronize(model)
    backend = outcore.engine_of(model).backend
    fetch, state_file = DiskTensors.fetch, backend._disk

    def fetch_weights(self: DiskTensors, records: Sequence[int]) -> Any:
        if self is state_file:
            raise LaneError("no moments")
        return fetch(self, records)

    loss_of(model, 1).backward()
    monkeypatch.setattr(DiskTensors, "fetch", fetch_weights)
    optimizer.step()
    blocks = [unit for unit in backend.units if unit.part.is_block]
    for unit in blocks:
        with pytest.raises(LaneError, match="no moments"):
            unit.block_until_updated()
    assert blocks[0].disk_weight is not None
    staging = blocks[0].disk_weight._file._lanes._staging
    assert len(staging._free) == staging.num_buffers
    outcore.engine_of(model).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["host", "device", "disk"])
def test_parameters_written_before_the_first_forward_count(
    disk: Path, weights: str, dtype: torch.dtype
) -> None:
    """No older master on the host or the disk may come back with the first update."""

    def run(written_late: bool) -> list[Tensor]:
        model = BY_NAME["llama"].make().train().to(torch.bfloat16)
        for late in (False, True):
            if late:
                model = outcore.offload(
                    model, device="cpu", dtype=dtype, weights=weights, disk=str(disk)
                )
                optimizer = outcore.AdamW(model, lr=1e-2)
            if late == written_late:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(2)
        train(model, optimizer, range(2))
        found = [tensor.clone() for tensor in model.state_dict().values()]
        outcore.release(model)
        return found

    with torch.backends.mkldnn.flags(enabled=dtype == torch.float32):
        assert all(map(torch.equal, run(True), run(False)))


def test_an_optimizer_that_could_not_start_leaves_room_for_another(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise outcore.OutOfBudget("no room")

    model = make(disk, state=["device", "disk", "host"])
    engine = outcore.engine_of(model)
    assert engine.disk is not None
    ledgers = engine.device_ledger, engine.host_ledger, engine.disk.ledger
    with monkeypatch.context() as patched:
        patched.setattr("outcore.optim.backend.Gradients", refuse)
        before = [ledger.taken_bytes for ledger in ledgers]
        with pytest.raises(outcore.OutOfBudget):
            outcore.AdamW(model, update_during_backward=True)
    assert engine.device_ledger.taken_bytes == before[0]
    assert engine.disk.ledger.taken_bytes == before[2]
    optimizer = outcore.AdamW(model, lr=1e-2)
    taken = [ledger.taken_bytes for ledger in ledgers]
    train(model, optimizer, range(2))
    outcore.release(model)

    model = make(disk, state=["device", "disk", "host"])
    engine = outcore.engine_of(model)
    assert engine.disk is not None
    ledgers = engine.device_ledger, engine.host_ledger, engine.disk.ledger
    outcore.AdamW(model, lr=1e-2)
    assert [ledger.taken_bytes for ledger in ledgers] == taken
    outcore.release(model)


@pytest.mark.timeout(30)
def test_closing_finishes_only_the_update_in_hand(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def slow(update: Any, *_: Any) -> None:
        begun.append(update)
        time.sleep(0.5)

    model = make(disk, **BOTH)
    optimizer = outcore.AdamW(model, lr=1e-2)
    loss_of(model, 0).backward()
    engine = outcore.engine_of(model)
    monkeypatch.setattr("outcore.optim.updates.ChunkUpdate.apply", slow)
    for _ in range(4):
        optimizer.step()
    on_disk = {unit.index for unit in engine.units if unit.is_on_disk}
    engine.close()
    assert sum(update.chunk.unit.index in on_disk for update in begun) <= 2
    with pytest.raises(LaneError, match="closed"):
        engine.backend._updaters._disk.synchronize()  # type: ignore[union-attr]


@pytest.mark.parametrize("weights", ["disk", ["disk", "host", "disk"]])
def test_weights_that_pass_by_the_host_give_the_same_losses(
    disk: Path, monkeypatch: pytest.MonkeyPatch, weights: Any
) -> None:
    """GPUDirect Storage, with a stand-in for cuFile that reads into the CPU device's memory."""

    def run(**options: Any) -> list[float]:
        model = make(disk, state="disk", **options)
        losses = train(model, outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0), range(4))
        outcore.release(model)
        return losses

    expected = run(weights="host")
    cufile = CufileOnHost(monkeypatch)
    monkeypatch.setattr(disk_tier, "found_gpu_direct_storage", lambda device, folder: True)
    with injected_delays(0.002, seed=1):
        assert run(weights=weights) == expected
    assert cufile.num_reads > 0
