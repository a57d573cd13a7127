"""Checkpoints whose names are not the model's are read into their homes without being converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import outcore
from outcore.engine import create
from outcore.weights.checkpoint_files import CheckpointFiles
from outcore.weights.stored_layout import stored_layout

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "intermediate_size": 96,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
CONFIGS = {
    "mixtral": hf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    # Twelve: by their names, the tenth comes before the second.
    "qwen3_moe": hf.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=12, head_dim=16),
    "deepseek_v3": hf.DeepseekV3Config(
        **SMALL,
        **EXPERTS,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "olmoe": hf.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
}


def whole_model(*args: Any, **options: Any) -> Any:
    raise AssertionError("the whole model was made beside its homes")


def save(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    """Save a model as it is stored on the Hub; return what plain transformers reads."""
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    plain = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(plain.state_dict())


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_that_are_stored_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, home: str
) -> None:
    plain = save(tmp_path, CONFIGS[name])
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert any(".experts.0." in key for key in file.keys())  # noqa: SIM118
    monkeypatch.setattr(create, "converted", whole_model)
    disk = {"disk": f"{tmp_path}:1GiB"} if home == "disk" else {}
    model = outcore.load(tmp_path, device="cpu", dtype=torch.float32, weights=home, **disk)
    found = model.state_dict()
    assert found.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(found[key], value), key
    outcore.release(model)


def test_a_packed_base_of_experts_is_read_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the codes of the same experts stored as one tensor."""
    config = CONFIGS["mixtral"]
    save(tmp_path / "apart", config)
    together = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "apart", dtype=torch.float32)
    options = {"device": "cpu", "dtype": torch.float32, "frozen_weights": "int8"}
    expected = outcore.offload(together.requires_grad_(False), **options)
    monkeypatch.setattr(create, "converted", whole_model)
    found = outcore.load(tmp_path / "apart", **options)
    ids = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("harm", ["one less", "another shape", "both"])
def test_what_does_not_fit_together_is_left_to_transformers(tmp_path: Path, harm: str) -> None:
    config = CONFIGS["mixtral"]
    plain = save(tmp_path, config)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    if harm == "one less":
        del tensors[name]
    elif harm == "another shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    else:
        fused = "model.layers.1.mlp.experts.down_proj"
        tensors[fused] = plain[fused]
    save_file(tensors, path, metadata={"format": "pt"})
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    assert stored_layout(model, CheckpointFiles(tmp_path)) is None
