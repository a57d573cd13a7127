"""Buffers that a block changes while it trains are changed once, as by plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import gradients_of, offloaded
from torch import Tensor, nn

import outcore


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)


class _Averaging(nn.Module):
    """Reads the buffer that it changes: a recompute must find what the forward found."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("constant", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.average.clone() * self.constant
        if self.training:
            with torch.no_grad():
                self.average.lerp_(y.mean((0, 1)), 0.3)
        return x + y.tanh()


class _Net(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return (x * torch.linspace(-1, 1, 8)).pow(2).mean()


@pytest.mark.parametrize("block", [_Normalised, _Averaging])
@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
def test_buffers_and_gradients_equal_plain_torch(block: Any, activations: str) -> None:
    plain, model = _Net(block).train(), offloaded(_Net(block), activations=activations).train()
    optimizer = outcore.AdamW(model)
    for step in range(2):
        ids = torch.arange(15).view(5, 3) + step
        plain.zero_grad()
        theirs, ours = plain(ids), model(ids)
        (theirs * 2).backward()
        ours.backward(retain_graph=True)
        ours.backward()  # a kept graph is recomputed here
        torch.testing.assert_close(ours, theirs)
        _assert_same_buffers(model, plain)
        found = gradients_of(model)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
        optimizer.zero_grad()
    with torch.no_grad():  # in training, but without gradients
        plain(ids), model(ids)
    _assert_same_buffers(model, plain)
    torch.testing.assert_close(model.eval()(ids), plain.eval()(ids))


def _assert_same_buffers(model: nn.Module, plain: nn.Module) -> None:
    theirs = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, theirs[name], msg=name)
