"""The comparison with plain torch: what counts as rounding, and what is only noise."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from outcore.verify import PlainTorchComparison, VerifyJob, check_against_plain_torch
from outcore.verify.plain_torch import relative_differences


def tiny_qwen2() -> nn.Module:
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def comparison(**fields: Any) -> PlainTorchComparison:
    return PlainTorchComparison(**{"noise": {}, "seconds": 1.0, **fields})


def test_key_biases_and_nothing_else_are_noise() -> None:
    found = check_against_plain_torch(tiny_qwen2, VerifyJob(steps=6))
    assert sorted(found.noise) == [f"model.layers.{i}.self_attn.k_proj.bias" for i in range(2)]
    assert found.is_close, found.too_far
    assert found.worst[0] not in found.noise


def test_no_machine_is_measured_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        pytest.fail("a plan was asked for")

    # Only for a GPU is a plan made by itself.
    monkeypatch.setattr("outcore.engine.offload.computes_on_cuda", lambda _: True)
    monkeypatch.setattr("outcore.engine.options.here", refuse)
    check_against_plain_torch(tiny_qwen2, VerifyJob(steps=1))


def test_noise_allows_as_much_as_torch_itself_shows_and_no_more() -> None:
    differences = {"bias": 5e-4, "weight": 1e-7}
    assert comparison(differences=differences, noise={"bias": 1e-4}).is_close
    far = comparison(differences=differences, noise={"bias": 1e-5})
    assert far.too_far == ["bias"]
    assert far.worst == ("weight", 1e-7)


def test_nan_is_the_worst_and_never_close() -> None:
    broken = comparison(differences={"a": 1e-7, "b": math.nan, "c": 1.0})
    assert broken.worst[0] == "b"
    assert broken.too_far == ["b", "c"]


def test_nothing_but_noise_proves_nothing() -> None:
    assert not comparison(differences={"a": 1e-3}, noise={"a": 1e-3}).is_close


def test_differences_are_relative() -> None:
    ours, theirs = torch.tensor([2.0002]), torch.tensor([2.0])
    assert math.isclose(relative_differences({"a": ours}, {"a": theirs})["a"], 1e-4, rel_tol=1e-2)
