"""What the files hold and the model has no place for is told, unless it is meant to be left out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import outcore

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
}


def written(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def with_tensors(folder: Path, **more: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})


def with_config(folder: Path, **changed: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def loaded(folder: Path) -> None:
    outcore.release(outcore.load(folder, device="cpu"))


def test_blocks_that_the_config_does_not_know(tmp_path: Path) -> None:
    with_config(written(tmp_path, hf.LlamaConfig(**SMALL)), num_hidden_layers=2)
    told = r"left out: model\.layers\.2\.input_layernorm\.weight, .* and 6 more\. Is it the config"
    with pytest.warns(UserWarning, match=told):
        loaded(tmp_path)


def test_biases_that_the_config_does_not_know(tmp_path: Path) -> None:
    with_config(
        written(tmp_path, hf.LlamaConfig(**SMALL, attention_bias=True)), attention_bias=False
    )
    with pytest.warns(UserWarning, match=r"left out: model\.layers\.0\.self_attn\.k_proj\.bias"):
        loaded(tmp_path)


@pytest.mark.parametrize("kind", ["as it was", "tied", "computed", "masks", "experts", "expected"])
def test_what_is_meant_to_be_left_out_is_not_told(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "masks":  # of GPT-2, which older versions stored in each layer
        written(tmp_path, hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64))
        attn = "transformer.h.0.attn"
        with_tensors(
            tmp_path,
            **{f"{attn}.bias": torch.ones(1, 1, 8, 8), f"{attn}.masked_bias": torch.tensor(-1e4)},
        )
    elif kind == "experts":
        written(tmp_path, hf.MixtralConfig(**SMALL, num_local_experts=2))
    else:
        written(tmp_path, hf.LlamaConfig(**SMALL, tie_word_embeddings=kind == "tied"))
    if kind == "tied":
        tensors = load_file(tmp_path / "model.safetensors")
        with_tensors(tmp_path, **{"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    if kind == "computed":
        with_tensors(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    if kind == "expected":  # by the model's class
        patterns = [r"model\.layers\.3.*"]
        monkeypatch.setattr(
            hf.LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns, raising=False
        )
        with_tensors(tmp_path, **{"model.layers.3.mlp.up_proj.weight": torch.ones(4, 4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded(tmp_path)


@pytest.mark.parametrize("auto_class", [hf.AutoModel, hf.AutoModelForSequenceClassification])
def test_a_head_that_another_class_has_no_place_for_is_not_told(
    tmp_path: Path, auto_class: Any
) -> None:
    """The second is converted: its own head begins with random values."""
    written(tmp_path, hf.LlamaConfig(**SMALL))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcore.release(outcore.load(tmp_path, device="cpu", auto_class=auto_class))
    assert [warning for warning in caught if "no place for" in str(warning.message)] == []


@pytest.mark.filterwarnings("ignore:.*they begin with random values")
def test_what_a_conversion_leaves_out_is_told(tmp_path: Path) -> None:
    written(tmp_path, hf.LlamaConfig(**SMALL))
    with_config(tmp_path, architectures=["LlamaForSequenceClassification"])
    with pytest.warns(UserWarning, match=r"left out: lm_head\.weight\. Is it the config"):
        loaded(tmp_path)
