"""A block is computed again under the autocast of its forward, whatever its backward is under."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 64)
        self.outer = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.outer(torch.nn.functional.silu(self.inner(x)))
        return hidden


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def loss_of(model: nn.Module, step: int, *, autocast: bool) -> Tensor:
    ids = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss: Tensor = model(ids)
    return loss


def trained(forward: bool, backward: bool, activations: str) -> dict[str, Tensor]:
    """Return the weights after three steps, by what forward and backward are under."""
    options: dict[str, Any] = {"activations": activations, "micro_batch": 2}
    model = outcore.offload(Stack().train(), device="cpu", **options)
    optimizer = outcore.AdamW(model, lr=1e-2)
    for step in range(3):
        loss = loss_of(model, step, autocast=forward)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    outcore.release(model)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_what_is_recomputed_is_what_was_kept(forward: bool, backward: bool) -> None:
    kept = trained(forward, backward, "keep")
    for activations in ("recompute", "offload"):
        found = trained(forward, backward, activations)
        assert all(torch.equal(found[name], kept[name]) for name in kept), activations


def test_a_forward_computes_in_the_type_of_autocast() -> None:
    plain, model = Stack().train(), outcore.offload(Stack().train(), device="cpu")
    losses = {on: loss_of(plain, 0, autocast=on).item() for on in (False, True)}
    assert losses[False] != pytest.approx(losses[True], rel=1e-6)
    for on, loss in losses.items():
        assert loss_of(model, 0, autocast=on).item() == pytest.approx(loss, rel=1e-6)
