"""Weights that a custom autograd function keeps for its backward past autograd's own list of them.

A kept block finds its saved weights again in whichever slot holds them by then. These it would not:
by then their old slot may have another block's weights.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore


class _InsideAnAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kept = {"factors": [weight.t()]}
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,), (grad,) = ctx.saved_tensors, grads
        weight = ctx.kept["factors"][0].t()
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _Attribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.weight, grads[0].flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape = weight.shape
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Layer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + torch.tanh(self.function.apply(x, self.inner.weight))
        return hidden


class Stack(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 32)
        self.layers = nn.ModuleList(Layer(function) for _ in range(5))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        losses = [model(torch.randint(0, 20, (4, 9), generator=generator)) for _ in range(3)]
        for loss in losses:  # each in slots that the others have used since
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("function", [_InsideAnAttribute, _Attribute, _Saved])
def test_gradients_are_those_of_the_plain_model(function: Any, compile: bool) -> None:
    plain = Stack(function).train()
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    options: dict[str, Any] = {"activations": "keep", "num_slots": 2, "compile": compile}
    options |= {"weights": "host", "device_memory": "1GiB"}
    model = outcore.offload(Stack(function).train(), device="cpu", **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(model, outcore.AdamW(model, lr=1e-2))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    words = {
        str(warning.message) for warning in told if "save_for_backward" in str(warning.message)
    }
    if not compile:  # the compiler knows what becomes of some of them
        assert len(words) == (function is not _Saved), words
