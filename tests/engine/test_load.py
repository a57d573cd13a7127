"""``outcore.load``: what it refuses, and the master that it starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import outcore

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=97,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, name: str, dtype: torch.dtype) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantized_tensor_is_refused_by_name(directory: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(directory, name, dtype)
    with pytest.raises(outcore.StoreError, match=f"{name}.*Dequantize"):
        outcore.load(directory, device="cpu")


def test_a_quantized_config_is_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(outcore.UnsupportedModel, match="fp8"):
        outcore.load(directory, device="cpu")


def test_a_file_that_is_cut_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(outcore.StoreError, match=r"model\.safetensors"):
        outcore.load(directory, device="cpu")


def test_an_fp32_checkpoint_starts_from_its_fp32_master(directory: Path) -> None:
    loaded = outcore.load(directory, device="cpu", dtype=torch.bfloat16)
    whole = outcore.offload(
        LlamaForCausalLM.from_pretrained(directory), device="cpu", dtype=torch.bfloat16
    )
    found = [outcore.engine_of(model).units for model in (loaded, whole)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.remainder is not None
        assert theirs.remainder is not None
        assert torch.equal(ours.remainder, theirs.remainder), ours.name
        assert ours.remainder.any() or "norm" in ours.name
