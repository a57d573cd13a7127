"""Compact and minimal state: few bytes, the same bits in every placement, saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME
from torch import Tensor

import outcore
from outcore.verify import VerifyJob, disk_placements, placements, verify

FORMATS = ["compact", "minimal"]


@pytest.fixture(autouse=True)
def plain_bf16() -> Iterator[None]:
    # Without oneDNN: its AMX kernels are illegal instructions in some sandboxes.
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    return outcore.offload(BY_NAME["llama"].make().train(), device="cpu", **options)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(0, 90, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("state_format", FORMATS)
def test_every_placement_has_the_same_bits(state_format: str, tmp_path: Path) -> None:
    job = VerifyJob(
        steps=4,
        seq_len=8,
        dtype=torch.bfloat16,
        disk=str(tmp_path),
        options={"state_format": state_format},
    )
    chosen = [p for p in placements(0.003) if "slot" not in p.name] + disk_placements(0.003)
    for comparison in verify(lambda: BY_NAME["llama"].make(), job, chosen):
        assert comparison.is_exact, f"{comparison.name}: {comparison.differing[:5]}"


@pytest.mark.parametrize(("state_format", "most"), [("compact", 5.2), ("minimal", 4.2)])
def test_bytes_of_a_parameter(state_format: str, most: float) -> None:
    model = make(state_format=state_format, weights="host")
    optimizer = outcore.AdamW(model, lr=1e-3)
    train(model, optimizer, range(1))
    states = outcore.engine_of(model).backend.states.values()
    num_bytes = sum(t.nbytes for state in states for t in state.tensors())
    assert num_bytes <= most * sum(state.weight.numel() for state in states)
    outcore.release(model)


@pytest.mark.parametrize("state_format", FORMATS)
def test_saving_and_loading_to_the_bit(state_format: str) -> None:
    model = make(state_format=state_format)
    optimizer = outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    train(model, optimizer, range(3))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    state["state"] = {
        index: {name: tensor.clone() for name, tensor in entry.items()}
        for index, entry in state["state"].items()
    }
    expected = train(model, optimizer, range(3, 6))
    outcore.release(model)
    model = make(state_format=state_format, num_visits=2, weights="device")
    optimizer = outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert train(model, optimizer, range(3, 6)) == expected
    outcore.release(model)


@pytest.mark.parametrize("state_format", ["fp32", *FORMATS])
def test_state_that_is_loaded_before_the_weights_is_told(state_format: str) -> None:
    """Weights that are written are their own master: what the state brought is lost."""
    model = make(dtype=torch.bfloat16, state_format=state_format)
    optimizer = outcore.AdamW(model, lr=1e-2)
    train(model, optimizer, range(2))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(weights)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(2, 3))
        model.load_state_dict(weights)  # an earlier model: not what was loaded last
    optimizer.load_state_dict(optimizer.state_dict())
    if state_format == "minimal":
        model.load_state_dict(weights)
    else:
        with pytest.warns(RuntimeWarning, match="Load the model first"):
            model.load_state_dict(weights)
    outcore.release(model)


def test_state_of_another_format_is_refused() -> None:
    exact = make(dtype=torch.bfloat16)
    state = outcore.AdamW(exact, lr=1e-2).state_dict()
    model = make(state_format="compact")
    optimizer = outcore.AdamW(model, lr=1e-2)
    with pytest.raises(ValueError, match="another state_format"):
        optimizer.load_state_dict(state)
    for offloaded in (exact, model):
        outcore.release(offloaded)


def test_formats_need_bf16() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16"):
        make(state_format="compact", dtype=torch.float32)
    with pytest.raises(ValueError, match="state_format must be one of"):
        make(state_format="int4")


def test_another_seed_rounds_otherwise() -> None:
    def run(seed: int) -> list[Tensor]:
        model = make(state_format="minimal")
        train(model, outcore.AdamW(model, lr=1e-3, rounding_seed=seed), range(2))
        found = [tensor.clone() for tensor in model.state_dict().values()]
        outcore.release(model)
        return found

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
