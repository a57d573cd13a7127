"""What is said of a family, beside what its model does with two documents in one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers_made_here import make_tokenizer
from train_files import Files
from transformers import AutoConfig, AutoModelForCausalLM

from outcore.train.display import Display
from outcore.train.packed_documents import keeps_packed_documents_apart
from outcore.train.run import train

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "gpt2": GPT2,
    "gpt_neox": {},
    "modernbert-decoder": {},
    "mixtral": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 8},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": False},
    "mamba": {"state_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {**EXPERTS, **LINEAR_AND_FULL},
    "recurrent_gemma": {"head_dim": 8, "lru_width": 32, "attention_window_size": 16},
}


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_model_does(family: str) -> None:
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids, others = torch.randint(1, 60, (2, 1, 24))
    others[:, 12:] = ids[:, 12:]
    positions = torch.arange(12).repeat(2)[None]
    with torch.no_grad():
        found = [
            model(input_ids=both, position_ids=positions, use_cache=False).logits[:, 12:]
            for both in (ids, others)
        ]
    assert found[0].isfinite().all()
    assert keeps_packed_documents_apart(config) is torch.allclose(*found, atol=1e-4)


def test_what_would_let_documents_meet_is_not_packed(files: Files, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    changes = {**SMALL, **FAMILIES["opt"], "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model("opt", **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "opt")
    tokenizer.save_pretrained(tmp_path / "opt")
    console = Console(record=True, quiet=False, file=(tmp_path / "log").open("w"), width=200)
    settings = files.settings(model=str(tmp_path / "opt"), max_steps=1)
    train(settings, Display(console))
    told = console.export_text()
    assert "no packing" in told
    train(files.settings("packed", max_steps=1), Display(console))
    assert "no packing" not in console.export_text()
