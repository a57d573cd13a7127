"""Clipping while no gradient waits: a pass over the batch for the norm, one for the updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from everything import differing, everything
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.stream.lanes import injected_delays

MAX_NORM = 0.3  # every step of these is clipped
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"num_visits": 0},
    "lodged": {"num_visits": 3},
    "device": {"weights": "device", "state": "device"},
    "disk": {"weights": "disk", "state": "disk"},
}


def make_model(tmp_path: Path, placement: str, num_layers: int = 4) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32,
        n_layer=num_layers,
        n_head=4,
        n_positions=16,
        vocab_size=97,
        bos_token_id=1,
        eos_token_id=1,
    )
    options = dict(PLACEMENTS[placement])
    if "disk" in options.values():
        options["disk"] = f"{tmp_path}:1GiB"
    return outcore.offload(GPT2LMHeadModel(config).train(), device="cpu", **options)


def make_optimizer(model: Any, **options: Any) -> outcore.AdamW:
    return outcore.AdamW(model, lr=1e-2, max_grad_norm=MAX_NORM, weight_decay=0.1, **options)


def loss_of(model: Any, seed: int) -> Tensor:
    ids = torch.randint(0, 97, (4, 8), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train(model: Any, optimizer: outcore.AdamW, steps: range) -> list[float]:
    """Return losses and norms; the weights are compared apart."""
    found = []
    for step in steps:

        def forward_and_backward(step: int = step) -> Tensor:
            loss = loss_of(model, step)
            loss.backward()
            return loss.detach()

        loss = optimizer.step(forward_and_backward)
        optimizer.zero_grad()
        assert optimizer.grad_norm is not None
        found += [float(loss), optimizer.grad_norm]
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_bits_of_gradients_that_wait(tmp_path: Path, placement: str) -> None:
    """With dropout: the second pass must draw what the first one drew, and the next step go on."""
    waiting = make_model(tmp_path, placement)
    reference = make_optimizer(waiting)
    torch.manual_seed(7)
    expected = train(waiting, reference, range(4))
    assert min(expected[1::2]) > MAX_NORM
    model = make_model(tmp_path, placement)
    optimizer = make_optimizer(model, update_during_backward=True)
    torch.manual_seed(7)
    with injected_delays(0.003, seed=1):
        found = train(model, optimizer, range(4))
    assert found == expected
    assert differing(everything(waiting, reference), everything(model, optimizer)) == []
    for each in (waiting, model):
        outcore.engine_of(each).close()


def test_no_gradient_waits(tmp_path: Path) -> None:
    held = {}
    for during in (False, True):
        model = make_model(tmp_path, "host", num_layers=16)
        optimizer = make_optimizer(model, update_during_backward=during)
        train(model, optimizer, range(1))
        held[during] = outcore.engine_of(model).host_ledger.peaks()["gradients"]
    gradients = sum(4 * p.numel() for p in model.parameters())
    assert held[False] >= gradients
    assert held[True] < 0.6 * gradients  # a ring that does not grow with the model


def test_a_bad_step_is_found_before_anything_changes(tmp_path: Path) -> None:
    model = make_model(tmp_path, "host")
    optimizer = make_optimizer(model, update_during_backward=True)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)

    def poisoned() -> Tensor:
        loss = loss_of(model, 2) * math.nan
        loss.backward()
        return loss.detach()

    with pytest.raises(outcore.NonFiniteGradient, match="no state was changed"):
        optimizer.step(poisoned)
    optimizer.on_non_finite = "skip"
    optimizer.step(poisoned)
    assert optimizer.num_skipped_steps == 1
    assert differing(before, everything(model, optimizer)) == []
    train(model, optimizer, range(2, 3))  # and it goes on
    assert differing(before, everything(model, optimizer)) != []


def test_one_pass_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, "host")
    optimizer = make_optimizer(model, update_during_backward=True)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="two passes"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="outside of step"):
        loss_of(model, 0).backward()

    def twice() -> Tensor:
        loss_of(model, 0).backward()
        loss = loss_of(model, 1)
        loss.backward()
        return loss.detach()

    with pytest.raises(RuntimeError, match="second gradient"):
        optimizer.step(twice)
    assert differing(before, everything(model, optimizer)) == []
    assert len(train(model, optimizer, range(1))) == 2


def test_a_closure_without_a_backward_changes_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path, "host")
    optimizer = make_optimizer(model, update_during_backward=True)
    before = everything(model, optimizer)
    assert optimizer.step(lambda: 1.5) == 1.5
    assert differing(before, everything(model, optimizer)) == []
