"""Blocks with outputs that are sums over the batch, and inputs of one number for each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import offloaded
from torch import Tensor, nn
from torch.nn import functional as F

import outcore

NUM_EXPERTS = 8
IDS = torch.arange(24).view(4, 6)
SCALES = torch.tensor([0.1, 0.5, 1.0, 2.0])


class _Block(nn.Module):
    """Returns how much each expert would be used, as a router's balance loss wants it."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes
        self.inner = nn.Linear(16, 16)
        self.router = nn.Linear(16, NUM_EXPERTS)

    def forward(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        used = self.router(x).softmax(-1).mean((0, 1))
        if self.axes[-1] == 1:
            used = used.pow(2).sum()
        return x + self.inner(x) * scales[:, None, None], used.view(self.axes)


class _Net(nn.Module):
    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(_Block(axes) for _ in range(3))
        self.head = nn.Linear(16, 30)

    def forward(self, ids: Tensor, scales: Tensor) -> Tensor:
        x, balance = self.embedding(ids), torch.zeros(())
        for layer in self.layers:
            x, used = layer(x, scales)
            balance = balance + used.pow(2).sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()) + balance


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize(
    "axes", [(1,), (1, 1), (NUM_EXPERTS,), (1, NUM_EXPERTS), (1, 1, NUM_EXPERTS)]
)
def test_training_is_as_in_torch(axes: tuple[int, ...], micro_batch: int) -> None:
    plain, model = _Net(axes), offloaded(_Net(axes), micro_batch=micro_batch)
    pairs: list[tuple[Any, Any]] = [
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)),
        (model, outcore.AdamW(model, lr=1e-2)),
    ]
    for _ in range(3):
        losses = []
        for net, optimizer in pairs:
            loss = net(IDS, SCALES)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    trained = model.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(trained[name], tensor, atol=1e-5), name
