"""Blocks that a step leaves out see no step: LayerDrop and early exit, as torch's AdamW does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from everything import differing, everything
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

import outcore
from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import StoreError

STEPS = 20
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"num_visits": 0},
    "visiting": {"num_visits": 3, "num_slots": 1},
    "device": {"weights": "device", "state": "device"},
    "disk": {"weights": "disk", "state": "disk"},
}


def plain_model(layerdrop: float = 0.3) -> Any:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=61,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        dropout=0.0,
        layerdrop=layerdrop,
    )
    return OPTForCausalLM(config).train()


def offloaded(tmp_path: Path, placement: str = "host", layerdrop: float = 0.3, **more: Any) -> Any:
    options = {**PLACEMENTS[placement], **more}
    if "disk" in options.values():
        options["disk"] = f"{tmp_path}:1GiB"
    return outcore.offload(plain_model(layerdrop), device="cpu", **options)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)  # of the layers that are dropped
        ids = torch.randint(0, 61, (4, 8))

        def forward_and_backward(ids: Tensor = ids) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss.detach()

        optimizer.step(forward_and_backward)
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def expected() -> tuple[Any, torch.optim.AdamW]:
    plain = plain_model()
    theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    train(plain, theirs, range(STEPS))
    return plain, theirs


def assert_like_torch(
    model: Any, optimizer: outcore.AdamW, expected: tuple[Any, torch.optim.AdamW]
) -> None:
    plain, theirs = expected
    outcore.synchronize(model)
    expected_weights = plain.state_dict()
    for name, ours in model.state_dict().items():
        if not name.endswith("k_proj.bias"):  # whose gradient is rounding noise
            difference = (ours - expected_weights[name]).norm() / expected_weights[name].norm()
            assert float(difference) <= 1e-5, name
    assert steps_of(optimizer) == steps_of(theirs)
    assert len(set(steps_of(theirs).values())) > 3  # layers were dropped, and not all alike


def steps_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return {key: int(entry["step"]) for key, entry in optimizer.state_dict()["state"].items()}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("during", [False, True])
def test_layerdrop_is_as_in_torch(
    tmp_path: Path, placement: str, during: bool, expected: tuple[Any, torch.optim.AdamW]
) -> None:
    model = offloaded(tmp_path, placement)
    optimizer = outcore.AdamW(model, update_during_backward=during, **OPTIONS)
    train(model, optimizer, range(STEPS))
    assert_like_torch(model, optimizer, expected)
    assert optimizer.num_steps == STEPS


@pytest.mark.parametrize("format", ["fp32", "compact"])
def test_every_placement_and_both_passes_give_the_same_bits(tmp_path: Path, format: str) -> None:
    runs = []
    with torch.backends.mkldnn.flags(enabled=False):
        for placement in PLACEMENTS:
            for during in (False, True):
                model = offloaded(tmp_path, placement, state_format=format, dtype=torch.bfloat16)
                optimizer = outcore.AdamW(
                    model, update_during_backward=during, max_grad_norm=0.5, **OPTIONS
                )
                train(model, optimizer, range(6))
                runs.append(everything(model, optimizer))
                outcore.engine_of(model).close()
    for run in runs[1:]:
        assert differing(runs[0], run) == []


def test_resuming_from_a_checkpoint(
    tmp_path: Path, expected: tuple[Any, torch.optim.AdamW]
) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    first = offloaded(tmp_path)
    optimizer = outcore.AdamW(first, **OPTIONS)
    train(first, optimizer, range(9))
    run_state.save(folder, first, optimizer, {})
    model = offloaded(tmp_path, "device")
    resumed = outcore.AdamW(model, **OPTIONS)
    assert run_state.load(folder, model, resumed) is not None
    assert resumed.num_steps == 9
    for each, its in ((first, optimizer), (model, resumed)):
        train(each, its, range(9, STEPS))
    assert differing(everything(first, optimizer), everything(model, resumed)) == []
    assert_like_torch(model, resumed, expected)


def test_resuming_from_a_state_of_torch(
    tmp_path: Path, expected: tuple[Any, torch.optim.AdamW]
) -> None:
    plain = plain_model()
    theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    train(plain, theirs, range(9))
    model = offloaded(tmp_path)
    optimizer = outcore.AdamW(model, **OPTIONS)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.num_steps == 9
    train(model, optimizer, range(9, STEPS))
    assert_like_torch(model, optimizer, expected)
    back = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    back.load_state_dict(optimizer.state_dict())
    assert steps_of(back) == steps_of(expected[1])


def test_steps_that_differ_inside_a_block(tmp_path: Path) -> None:
    """Of a parameter that torch saw without a gradient for a while."""
    plain = plain_model(layerdrop=0.0)
    late = plain.model.decoder.layers[1].fc1.weight
    theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    late.requires_grad_(False)
    train(plain, theirs, range(3))
    late.requires_grad_(True)
    train(plain, theirs, range(3, 5))
    model = offloaded(tmp_path, layerdrop=0.0)
    optimizer = outcore.AdamW(model, **OPTIONS)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    counts = optimizer.step_counts()
    assert counts.pop("model.decoder.layers.1.fc1.weight") == 2
    assert set(counts.values()) == {5}
    train(plain, theirs, range(5, 8))
    train(model, optimizer, range(5, 8))
    outcore.synchronize(model)
    ours = model.model.decoder.layers[1].fc1.weight
    assert float(((ours - late).norm() / late.norm()).detach()) <= 1e-6


@pytest.mark.parametrize("state_format", ["compact", "minimal"])
@pytest.mark.parametrize("from_checkpoint", [True, False])
def test_resuming_after_a_block_was_frozen_for_a_while(
    tmp_path: Path, state_format: str, from_checkpoint: bool
) -> None:
    """Stochastic rounding depends on the steps of the block, which the parameters' tell."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    options = {"layerdrop": 0.0, "state_format": state_format, "dtype": torch.bfloat16}
    first = offloaded(tmp_path, **options)
    optimizer = outcore.AdamW(first, **OPTIONS)
    block = first.model.decoder.layers[1]
    for is_trained, steps in ((True, range(2)), (False, range(2, 5)), (True, range(5, 6))):
        block.requires_grad_(is_trained)
        train(first, optimizer, steps)
    assert optimizer.step_counts()["model.decoder.layers.1.fc1.weight"] == 3
    model = offloaded(tmp_path, **options)
    resumed = outcore.AdamW(model, **OPTIONS)
    if from_checkpoint:
        run_state.save(folder, first, optimizer, {})
        assert run_state.load(folder, model, resumed) is not None
    else:
        model.load_state_dict(first.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
    for each, its in ((first, optimizer), (model, resumed)):
        train(each, its, range(6, 9))
    assert differing(everything(first, optimizer), everything(model, resumed)) == []


def _rewritten(folder: CheckpointFolder, counts: Any) -> None:
    """Replace the counts in a manifest as an earlier version, or somebody else, would have it."""
    from outcore.checkpoint.manifest import _digest

    path = folder.directory(folder.steps()[-1]) / "manifest.json"
    body = json.loads(path.read_text())
    del body["digest"], body["values"]["step_counts"]
    if counts is not None:
        body["values"]["step_counts"] = counts
    path.write_text(json.dumps({**body, "digest": _digest(body)}))


def test_a_checkpoint_without_counts_has_seen_every_step(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    model = offloaded(tmp_path)
    optimizer = outcore.AdamW(model, **OPTIONS)
    train(model, optimizer, range(4))
    assert set(optimizer.step_counts().values()) != {4}
    run_state.save(folder, model, optimizer, {})
    _rewritten(folder, None)
    run_state.load(folder, model, optimizer)
    assert set(optimizer.step_counts().values()) == {4}


@pytest.mark.parametrize("change", [{"lm_head": 1}, -1, 5, True, "4", None])
def test_counts_of_a_checkpoint_are_checked(tmp_path: Path, change: Any) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    model = offloaded(tmp_path)
    optimizer = outcore.AdamW(model, **OPTIONS)
    train(model, optimizer, range(4))
    counts: dict[str, Any] = optimizer.step_counts()
    run_state.save(folder, model, optimizer, {})
    before = everything(model, optimizer)
    wrong = change if isinstance(change, dict) else {**counts, next(iter(counts)): change}
    _rewritten(folder, wrong)
    with pytest.raises(StoreError, match="steps"):
        run_state.load(folder, model, optimizer)
    assert differing(before, everything(model, optimizer)) == []


def test_a_skipped_step_counts_for_nobody(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    optimizer = outcore.AdamW(model, on_non_finite="skip", **OPTIONS)
    train(model, optimizer, range(3))
    before = optimizer.step_counts()
    ids = torch.ones(2, 4, dtype=torch.long)
    for _ in range(2):
        (model(input_ids=ids, labels=ids).loss * math.nan).backward()
        with pytest.warns(RuntimeWarning, match=r"step 4 was skipped.*decoder\.layers\.\d\b"):
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_skipped_steps == 2
    assert optimizer.step_counts() == before
    assert optimizer.num_steps == 3
