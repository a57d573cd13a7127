"""What is written through ``parameter.data`` counts, as what is written to the parameter does."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LR, batch_of, offloaded, relative_difference
from torch import Tensor, nn
from training import LLAMA, train

import outcore

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"num_visits": 3, "num_slots": 4, "activations": "keep"},
    {"weights": "device"},
    {"weights": "device", "state": "device"},
    {"weights": "disk", "state": "disk"},
]


def with_averages(net: Any, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[Tensor]]:
    """Train, and evaluate the averages of the weights in between, as many scripts do."""
    averages = [parameter.data.clone() for parameter in net.parameters()]
    losses = []
    for step in range(3):
        losses += train(net, optimizer, range(step, step + 1))
        if isinstance(optimizer, outcore.AdamW):
            outcore.synchronize(net)
        for average, parameter in zip(averages, net.parameters(), strict=True):
            average.lerp_(parameter.data, 0.5)
        trained = [parameter.data.clone() for parameter in net.parameters()]
        for average, parameter in zip(averages, net.parameters(), strict=True):
            parameter.data.copy_(average)
        with torch.no_grad():
            losses.append(float(net(**batch_of(seed=9)).loss))
        for before, parameter in zip(trained, net.parameters(), strict=True):
            parameter.data.copy_(before)
    for parameter in net.parameters():
        parameter.data.mul_(0.9)
    losses += train(net, optimizer, range(3, 5))
    return losses, averages


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_averages_that_are_swapped_in_and_out(disk: Path, placement: dict[str, Any]) -> None:
    plain = LLAMA.make()
    expected, their_averages = with_averages(plain, torch.optim.AdamW(plain.parameters(), lr=LR))
    model = offloaded(LLAMA.make(), disk=str(disk), **placement)
    losses, averages = with_averages(model, outcore.AdamW(model, lr=LR))
    assert losses == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(averages, their_averages, strict=True):
        assert relative_difference(ours, theirs) <= 1e-5
    trained = model.state_dict()
    for name, tensor in plain.state_dict().items():
        assert relative_difference(trained[name], tensor) <= 1e-5, name
    outcore.release(model)
    for name, tensor in plain.state_dict().items():
        assert relative_difference(model.state_dict()[name], tensor) <= 1e-5, name


def test_parameters_are_ordinary_ones_again_after_release() -> None:
    model = offloaded(LLAMA.make())
    parameters = list(model.parameters())
    assert all(isinstance(parameter, nn.Parameter) for parameter in parameters)
    outcore.release(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert {type(parameter) for parameter in parameters} == {nn.Parameter}


def test_a_copy_of_a_parameter_has_memory_of_its_own() -> None:
    model = offloaded(LLAMA.make())
    weight = model.model.layers[1].mlp.up_proj.weight
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for other in (copy.deepcopy(weight), torch.load(file)):
        assert type(other) is nn.Parameter
        torch.testing.assert_close(other, weight)
        before = weight.detach().clone()
        other.data.zero_()
        torch.testing.assert_close(weight.detach(), before)


class _Marked(nn.Parameter):
    """A user's own class of parameters."""


def test_parameters_of_another_class_keep_it() -> None:
    plain = LLAMA.make()
    plain.model.norm.weight = _Marked(plain.model.norm.weight.data)
    model = offloaded(plain)
    assert type(model.model.norm.weight) is _Marked
    model(**batch_of()).loss.item()
    outcore.release(model)
    assert type(model.model.norm.weight) is _Marked


def test_the_compiler_takes_them() -> None:
    """No graph breaks at a class that it does not know."""
    model = offloaded(LLAMA.make(), compile=True)
    expected = LLAMA.make()(**batch_of()).loss
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert float(model(**batch_of()).loss.detach()) == pytest.approx(expected.item(), rel=1e-5)
    head = torch.compile(lambda hidden: hidden @ model.lm_head.weight.t(), fullgraph=True)
    hidden = torch.ones(1, model.lm_head.in_features)
    torch.testing.assert_close(head(hidden), hidden @ model.lm_head.weight.t())
