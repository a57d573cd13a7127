"""What the exactness tests train: a small model of each kind, with dropout, and placements."""

from __future__ import annotations

from typing import Any

import transformers as hf

from outcore.verify.exactness import Placement

VOCAB = 97
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**changes: Any) -> Any:
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        **TOKENS,
        **changes,
    )
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def gpt2() -> Any:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=64, **TOKENS
    )
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    return hf.AutoModelForCausalLM.from_config(config)


def mixtral() -> Any:
    config = hf.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        attention_dropout=0.1,
        output_router_logits=True,
        **TOKENS,
    )
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def t5() -> Any:
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,  # and as many in the decoder
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    return hf.AutoModelForSeq2SeqLM.from_config(config)


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "t5": t5}
BOTH = {"weights": "host", "state": "host"}
MORE_PLACEMENTS = [
    Placement(name="both, 3 slots", options={**BOTH, "num_slots": 3}),
    Placement(name="weights resident, kept", options={"weights": "device", "activations": "keep"}),
    Placement(name="both, as kept as fits", options={**BOTH, "device_memory": "800KB"}),
    Placement(
        name="both, state visiting, 1 slot, kept",
        options={**BOTH, "num_visits": 3, "num_slots": 1, "activations": "keep"},
    ),
]
