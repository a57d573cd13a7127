"""What eager blocks save, counted on the meta device, against what autograd saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import outcore
from outcore import saved_activations
from outcore.model_spec import spec_of_model
from outcore.passes import block_function

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


SMALL_LLAMA = transformers.LlamaConfig(
    hidden_size=256,
    intermediate_size=768,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=100,
)


def predicted_and_saved(
    name: str, attention: str, dtype: str = "fp32", *, is_compiled: bool = False
) -> tuple[float, int]:
    """Return the bytes of the largest block of one batch."""
    family = BY_NAME[name]
    model = family.make().train()
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 90, (2, 48))
    predicted = max(
        block.kept_bytes_per_token(dtype, is_compiled=is_compiled)
        + block.attention.kept_bytes(48, dtype, is_masked=False, is_compiled=is_compiled)
        for block in spec_of_model(model).blocks
        if block.attention is not None
    )
    model = outcore.offload(
        model,
        device="cpu",
        compile=is_compiled,
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


@pytest.mark.parametrize("dropout", [None, 0.05])
def test_compiled_blocks_with_and_without_adapters(dropout: float | None) -> None:
    """To the byte: what is remade, adapters' inner products, a byte for each element dropped."""
    peft = pytest.importorskip("peft")
    model: Any = transformers.LlamaForCausalLM(SMALL_LLAMA)
    if dropout is not None:
        adapters = peft.LoraConfig(
            r=8, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout
        )
        model = peft.get_peft_model(model, adapters)
    block = spec_of_model(model).blocks[-1]
    model = outcore.offload(
        model, device="cpu", compile=True, activations="recompute", micro_batch=2
    ).train()
    outcore.AdamW(model, lr=1e-3)
    ids = torch.randint(3, 90, (2, 128))
    model(input_ids=ids, labels=ids).loss.backward()
    saved = outcore.engine_of(model).policy.largest_bytes()
    outcore.release(model)
    assert block.kept_bytes_per_token("fp32") * ids.numel() == saved
    assert block.graph_bytes_per_token("fp32") > 1.3 * block.kept_bytes_per_token("fp32")


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
def test_compiled_blocks_save_more_than_their_products_give(name: str) -> None:
    """Queries and keys beside the product that they are part of; what a last norm reads."""
    predicted, saved = predicted_and_saved(name, "sdpa", is_compiled=True)
    assert 0.98 * saved <= predicted <= 1.03 * saved


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_dora_saves_what_its_magnitudes_scale(dropout: float) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=4, target_modules="all-linear", lora_dropout=dropout, use_dora=True
    )
    model: Any = peft.get_peft_model(transformers.LlamaForCausalLM(SMALL_LLAMA), adapters).train()
    block = spec_of_model(model).blocks[-1]
    model = outcore.offload(model, device="cpu", activations="recompute", micro_batch=2)
    outcore.AdamW(model, lr=1e-3)
    ids = torch.randint(3, 90, (2, 128))
    model(input_ids=ids, labels=ids).loss.backward()
    saved = outcore.engine_of(model).policy.largest_bytes()
    outcore.release(model)
    predicted = block.kept_bytes_per_token("fp32", is_compiled=False) * ids.numel()
    assert saved <= predicted <= 1.09 * saved


def most_bytes(work: Any) -> int:
    """Return the most memory that ``work`` has at a time, beyond what was there before."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event for event in events if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


@pytest.mark.parametrize("is_long", [False, True], ids=["a few tokens", "many tokens"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_the_widest_layer_of_a_compiled_backward(
    family: str, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two factors, both in one product, or none: beside them, gradients and what is remade."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 64, "intermediate_size": 1024}
    config = {
        "llama": transformers.LlamaConfig(**sizes),
        "phi3": transformers.Phi3Config(**sizes, pad_token_id=0),
        "gpt2": transformers.GPT2Config(
            n_embd=128, n_head=2, n_layer=2, n_inner=1024, vocab_size=64,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        ),
    }[family]  # fmt: skip
    if is_long:
        monkeypatch.setattr(saved_activations, "LONG_HIDDEN_BYTES", 1)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    block = spec_of_model(model).blocks[-1]
    model = outcore.offload(
        model, device="cpu", compile=True, activations="recompute", micro_batch=2
    ).train()
    outcore.AdamW(model, lr=1e-3)
    ids = torch.randint(3, 60, (2, 1024))
    model(input_ids=ids, labels=ids).loss.backward()  # compiled now
    engine_function = block_function.BlockFunction.backward
    found: list[int] = []

    def measured(ctx: Any, *grads: Any) -> Any:
        results: list[Any] = []
        found.append(most_bytes(lambda: results.append(engine_function(ctx, *grads))))
        return results[0]

    monkeypatch.setattr(block_function.BlockFunction, "backward", staticmethod(measured))
    model(input_ids=ids, labels=ids).loss.backward()
    outcore.release(model)
    predicted = block.kept_bytes_per_token("fp32", saves_little=not is_long)
    predicted += block.derivative_bytes_per_token("fp32", saves_little=not is_long)
    gradients = 4 * block.trainable_parameters  # of the weights, as far as they are there by then
    assert predicted * ids.numel() <= 1.01 * max(found)
    assert max(found) <= predicted * ids.numel() + gradients
