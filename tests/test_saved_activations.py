"""What eager blocks save, counted on the meta device, against what autograd saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import outcore
from outcore import saved_activations
from outcore.model_spec import spec_of_model

sys.path.insert(0, str(Path(__file__).parent / "engine"))
from families import BY_NAME

# Written out or fused, norms of heads, norms after products, windows, caps, learned biases.
EXACT = [
    ("llama", "eager"), ("llama", "sdpa"), ("qwen3", "sdpa"), ("mistral", "sdpa"),
    ("gemma2", "eager"), ("gemma3", "sdpa"), ("olmo2", "sdpa"), ("gpt2", "sdpa"),
    ("bloom", "eager"), ("bert", "sdpa"), ("t5", "eager"),
]  # fmt: skip
ROUGH = [
    ("phi3", "sdpa"), ("gpt-neox", "sdpa"), ("cohere", "sdpa"), ("bart", "sdpa"),
    ("mixtral", "sdpa"), ("qwen3-moe", "sdpa"), ("deepseek-v3", "sdpa"),
]  # fmt: skip


def predicted_and_saved(name: str, attention: str, dtype: str = "fp32") -> tuple[float, int]:
    """Return the bytes of the largest block of one batch."""
    family = BY_NAME[name]
    model = family.make().train()
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 90, (2, 48))
    predicted = max(
        block.kept_bytes_per_token(dtype, is_compiled=False)
        + block.attention.kept_bytes(48, dtype, is_masked=False, is_compiled=False)
        for block in spec_of_model(model).blocks
        if block.attention is not None
    )
    model = outcore.offload(
        model,
        device="cpu",
        activations="recompute",
        micro_batch=2,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
    )
    outcore.AdamW(model, lr=1e-3)
    model(input_ids=ids, labels=ids, **family.extra).loss.backward()
    saved = outcore.engine_of(model).policy.largest_bytes()
    outcore.release(model)
    return predicted * ids.numel(), saved


@pytest.mark.parametrize(("name", "attention"), EXACT)
def test_families_that_are_counted_exactly(name: str, attention: str) -> None:
    predicted, saved = predicted_and_saved(name, attention)
    assert predicted == pytest.approx(saved, rel=0.015)


@pytest.mark.parametrize(("name", "attention"), ROUGH)
def test_families_that_are_counted_roughly(name: str, attention: str) -> None:
    predicted, saved = predicted_and_saved(name, attention)
    assert 0.96 * saved <= predicted <= 1.2 * saved


@pytest.mark.parametrize(("name", "attention"), EXACT)
def test_in_bf16_norms_and_scores_save_fp32(name: str, attention: str) -> None:
    """In which compact and minimal state are computed with on a CPU."""
    predicted, saved = predicted_and_saved(name, attention, "bf16")
    assert 0.97 * saved <= predicted <= 1.06 * saved


def test_a_frozen_model_that_was_looked_at_before_changes_nothing() -> None:
    """Its norms save less, look the same, and are found in the same process."""

    def kept_by_blocks(is_trained: bool) -> list[float]:
        model = BY_NAME["llama"].make().requires_grad_(is_trained)
        blocks = spec_of_model(model).blocks
        return [block.kept_bytes_per_token("fp32", is_compiled=False) for block in blocks]

    saved_activations._found_inside.clear()
    trained = kept_by_blocks(True)
    saved_activations._found_inside.clear()
    frozen = kept_by_blocks(False)
    assert kept_by_blocks(True) == trained
    assert all(less < more for less, more in zip(frozen, trained, strict=True))
