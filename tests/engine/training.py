"""What several tests of the engine do: train a while, and compare what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import (
    BY_NAME,
    LR,
    Family,
    batch_of,
    gradients_of,
    offloaded,
)
from torch import Tensor

import outcore

LLAMA = BY_NAME["llama"]
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"state": "device"},
    {"weights": "device", "num_visits": 2},
    {"weights": "device", "state": "device"},
    {"num_slots": 1, "num_visits": 3, "activations": "keep"},
]
LossOf = Callable[[Any], Tensor]


def with_optimizer(model: Any, **adamw: Any) -> tuple[Any, outcore.AdamW]:
    return model, outcore.AdamW(model, lr=LR, **adamw)


def assert_same_gradients(
    loss_of: LossOf, family: Family = LLAMA, bound: float = 1e-5, **options: Any
) -> None:
    """``loss_of`` gives the same loss and gradients on the plain and on the offloaded model."""
    plain = family.make()
    theirs = loss_of(plain)
    theirs.backward()
    model, _ = with_optimizer(offloaded(family.make(), **options))
    ours = loss_of(model)
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    found = gradients_of(model)
    largest = max(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert name not in found or not found[name].any(), name
        else:
            limit = bound * float(parameter.grad.norm()) + 1e-7 * largest
            assert float((found[name] - parameter.grad).norm()) <= limit, name


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def train(model: Any, optimizer: Any, seeds: range, schedule: Any = None) -> list[float]:
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = model(**batch_of(seed=seed)).loss
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """As torch.save and torch.load would give it back."""
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def outcore_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("outcore-")]
