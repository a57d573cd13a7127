"""Compiled blocks with code that the compiler cannot take in, and leaves to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.passes.compilation import _Inductor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):  # the compiler takes in no loop of which it cannot take in a part
            x = x + torch.tanh(self.inner(x)).exp()
            torch._dynamo.graph_break()
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_watches_the_block_is_not_compiled_for_it(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called for each tensor that is saved, and each would have been a graph of its own."""
    graphs: list[Any] = []

    def as_it_is(_: _Inductor, graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        forward: Callable[..., Any] = graph.forward
        return forward

    monkeypatch.setattr(_Inductor, "__call__", as_it_is)
    options: dict[str, Any] = {"weights": "host", "activations": activations}
    model = outcore.offload(Stack().train(), device="cpu", compile=True, **options)
    optimizer = outcore.AdamW(model, lr=1e-2)
    for _ in range(2):
        model(torch.arange(12).view(2, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert graphs == []
