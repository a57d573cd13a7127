"""Every placement has the bits of the resident run on a GPU: bf16, compiled, dropout, delays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    PretrainedConfig,
    Qwen2Config,
)

from outcore.verify import VerifyJob, check_against_plain_torch, placements, verify

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

CONFIGS = {
    "qwen2": Qwen2Config(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=997,
        attention_dropout=0.1,
    ),
    "gpt2": GPT2Config(
        n_embd=512, n_layer=4, n_head=4, vocab_size=997, bos_token_id=1, eos_token_id=1
    ),
    # Widths that are no powers of two, two kinds of blocks, and an embedding of several chunks.
    "gemma3": Gemma3TextConfig(
        hidden_size=576,
        intermediate_size=1152,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=20_011,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "compiled"), [(torch.bfloat16, True), (torch.float32, False)])
def test_every_placement_has_the_bits_of_the_resident_run(
    name: str, dtype: torch.dtype, compiled: bool
) -> None:
    config: PretrainedConfig = CONFIGS[name]
    job = VerifyJob(
        device="cuda", dtype=dtype, sequences=4, seq_len=256, options={"compile": compiled}
    )
    delayed = [replace(placement, max_delay_s=0.05) for placement in placements()]
    for comparison in verify(lambda: AutoModelForCausalLM.from_config(config), job, delayed):
        assert comparison.losses_equal, comparison.name
        assert comparison.differing == [], comparison.name


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_hugging_face_agrees_to_rounding(name: str) -> None:
    config: PretrainedConfig = CONFIGS[name]
    job = VerifyJob(device="cuda", dtype=torch.float32, sequences=4, seq_len=256)
    result = check_against_plain_torch(lambda: AutoModelForCausalLM.from_config(config), job)
    assert result.is_close, result.too_far
