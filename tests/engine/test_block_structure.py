"""Layers and parameters that are replaced after offload are refused, not ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from families import BY_NAME, batch_of, offloaded
from torch import nn
from torch.nn.utils import parametrizations
from training import LLAMA, train, with_optimizer

import outcore


def _new_layer(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.up_proj = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False)


def _new_parameter(model: Any) -> None:
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(torch.zeros_like(projection.weight))


def _parametrization(model: Any) -> None:
    parametrizations.spectral_norm(model.model.layers[1].mlp.up_proj)


@pytest.mark.parametrize("change", [_new_layer, _new_parameter, _parametrization])
@pytest.mark.parametrize("trains", [True, False])
def test_a_block_that_was_changed_is_refused(change: Callable[[Any], None], trains: bool) -> None:
    model = offloaded(LLAMA.make())
    change(model)
    refused = r"parameters of model\.layers\.1 were replaced after outcore\.offload"
    with torch.set_grad_enabled(trains), pytest.raises(outcore.OutcoreError, match=refused):
        model(**batch_of())


def test_weights_that_functional_call_brings_are_refused_and_leave_nothing_behind() -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    weights = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with pytest.raises(outcore.OutcoreError, match="functional_call"):
        torch.func.functional_call(model, weights, kwargs=batch_of())
    train(model, optimizer, range(1))


def test_layers_without_parameters_may_be_replaced() -> None:
    plain, model = LLAMA.make(), offloaded(LLAMA.make())
    for each in (plain, model):
        each.model.layers[1].mlp.act_fn = nn.Tanh()
    expected = float(plain(**batch_of()).loss.detach())
    assert float(model(**batch_of()).loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_another_head_is_used() -> None:
    """Edges are plain PyTorch."""
    plain, model = LLAMA.make(), offloaded(LLAMA.make())
    for each in (plain, model):
        each.lm_head.weight = nn.Parameter(each.lm_head.weight.detach() * 2)
    expected = float(plain(**batch_of()).loss.detach())
    assert float(model(**batch_of()).loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_adapters_of_fused_experts_leave_parameters_what_they_are() -> None:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts)
    model, optimizer = with_optimizer(
        offloaded(peft.get_peft_model(BY_NAME["qwen3-moe"].make(), config))
    )
    before = [name for name, _ in model.named_parameters()]
    train(model, optimizer, range(2))
    assert [name for name, _ in model.named_parameters()] == before
    outcore.release(model)
    assert [name for name, _ in model.named_parameters()] == before
