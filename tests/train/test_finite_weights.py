"""Weights that are not finite are found wherever they live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.train import finite_weights
from outcore.train.finite_weights import first_not_finite


@pytest.mark.parametrize("home", ["device", "host", "disk"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_the_first_one_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    closed_engines: None,
    home: str,
    value: float,
) -> None:
    monkeypatch.setattr(finite_weights, "_ELEMENTS_AT_A_TIME", 100)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61, n_positions=16)
    model = outcore.offload(
        GPT2LMHeadModel(config), device="cpu", disk=str(tmp_path), weights=home, state=home
    )
    outcore.AdamW(model, lr=1e-2)
    assert first_not_finite(model) is None
    name, parameter = list(model.named_parameters())[-3]
    with torch.no_grad():
        parameter.view(-1)[-1] = value
    assert first_not_finite(model) == name
