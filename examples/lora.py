"""LoRA over a frozen base that streams: no gradients and no optimizer state for the base.

PEFT wraps the model, Outcore offloads what PEFT returns, and the adapter is saved as PEFT does.

    python examples/lora.py
    python examples/lora.py --model DIR --device-memory 24GiB --output DIR
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import outcore
from outcore.units import format_bytes

TINY = LlamaConfig(
    vocab_size=256,  # bytes
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LENGTH = 24


def sums(model: str | None, device: str) -> dict[str, Tensor]:
    """Sentences such as "3 plus 4 is 7." as one batch; the padding does not count for the loss."""
    texts = [f"{a} plus {b} is {a + b}." for a in range(8) for b in range(8)]
    if model is None:
        rows = [list(text.encode()) for text in texts]
    else:
        rows = AutoTokenizer.from_pretrained(model)(texts)["input_ids"]
    ids = torch.tensor([(row + [0] * LENGTH)[:LENGTH] for row in rows])
    labels = torch.tensor([(row + [-100] * LENGTH)[:LENGTH] for row in rows])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": labels.ne(-100).long()}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def main(arguments: list[str] | None = None) -> tuple[list[float], Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face directory or Hub id; a tiny Llama without")
    parser.add_argument("--device-memory", help="a budget such as 24GiB; what is free without")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", help="where the adapter goes")
    options = parser.parse_args(arguments)
    output = options.output or tempfile.mkdtemp(prefix="lora-")

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model is None:
        base = AutoModelForCausalLM.from_config(TINY)
    else:
        base = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model = outcore.offload(model, device=device, device_memory=options.device_memory)
    optimizer = outcore.AdamW(
        model, lr=1e-2 if options.model is None else 1e-4, weight_decay=0.0, max_grad_norm=1.0
    )
    batch = sums(options.model, device)

    losses: list[float] = []
    model.train()
    for step in range(1, options.steps + 1):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")

    model.save_pretrained(output)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"trained {trained:,} of {total:,} parameters; the adapter is in {output}")
    for tier in outcore.engine_of(model).report():
        print(f"{tier.tier}: {format_bytes(tier.peak_bytes)} at most")
    return losses, model


if __name__ == "__main__":
    main()
