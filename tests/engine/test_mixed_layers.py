"""Layers of several classes in one list are blocks; stages of several classes are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from families import LR, VOCAB, batch_of, offloaded, relative_difference
from torch import nn
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import outcore
from outcore.blocks import find_parts


def _mllama(**_: Any) -> Any:
    torch.manual_seed(0)
    config = MllamaTextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[1, 3],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
    )
    model = hf.MllamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers[1::2]:
            layer.cross_attn_attn_gate.fill_(0.5)  # at zero it would hide the layer
            layer.cross_attn_mlp_gate.fill_(0.5)
    return model


@pytest.mark.parametrize("sees_images", [False, True])
@pytest.mark.parametrize("options", [{}, {"activations": "keep", "num_slots": 1}])
def test_cross_attention_layers_among_others(sees_images: bool, options: dict[str, Any]) -> None:
    """Without an image they are passed over."""
    batch = batch_of(sequences=4)
    if sees_images:
        generator = torch.Generator().manual_seed(2)
        batch["cross_attention_states"] = torch.randn(4, 6, 32, generator=generator)
    plain, model = _mllama(), offloaded(_mllama(), **options)
    theirs = torch.optim.AdamW(plain.parameters(), lr=LR, eps=1e-4)
    optimizer = outcore.AdamW(model, lr=LR, eps=1e-4)
    for _ in range(3):
        losses = []
        for net, steps in ((plain, theirs), (model, optimizer)):
            steps.zero_grad()
            loss = net(**batch).loss
            loss.backward()
            steps.step()
            losses.append(float(loss.detach()))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    ours = model.state_dict()
    for name, parameter in plain.named_parameters():
        assert relative_difference(ours[name], parameter) <= 1e-4, name


class _Layer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))


class _OtherLayer(_Layer): ...


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer()])


class _OtherStage(_Stage): ...


def _blocks(*members: nn.Module) -> list[str]:
    model = nn.Module()
    model.members = nn.ModuleList(members)
    return [part.name for part in find_parts(model) if part.is_block]


def test_classes_that_repeat_are_layers() -> None:
    assert _blocks(_Layer(), _OtherLayer(), _Layer()) == ["members.0", "members.1", "members.2"]


def test_what_repeats_inside_stages_is_the_block() -> None:
    found = _blocks(_Stage(), _OtherStage(), _Stage())
    assert found == [f"members.{i}.layers.{j}" for i in range(3) for j in range(2)]


def test_parts_of_different_kinds_are_no_layers() -> None:
    with pytest.raises(outcore.UnsupportedModel, match="classes that repeat"):
        _blocks(_Layer(), _OtherLayer())
