"""A tiny model with LoRA adapters whose matrices are large enough to be packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import torch
import transformers as hf
from torch import Tensor, nn

import outcore
from outcore.kernels.packed import unpack
from outcore.kernels.packed_format import FORMATS
from outcore.store.packed_spans import is_packable

VOCAB = 97


def config(**changes: Any) -> Any:
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 176,  # no multiple of either format's block
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_bias": True,
        **changes,
    }
    return hf.LlamaConfig(**values)


def lora(**changes: Any) -> Any:
    values = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    return peft.LoraConfig(**values)


def moved_adapters(model: nn.Module) -> nn.Module:
    """Give adapters values that matter: PEFT starts half of them at zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def plain_model(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    base = hf.AutoModelForCausalLM.from_config(config(**changes), attn_implementation="eager")
    return moved_adapters(peft.get_peft_model(base, lora()))


def rounded_model(format_name: str, seed: int = 0) -> nn.Module:
    """The plain model with its frozen block matrices replaced by what the format makes of them."""
    model, format = plain_model(seed), FORMATS[format_name]
    num_replaced = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and is_packable(name, parameter):
                codes, scales = format.pack(parameter)
                parameter.copy_(unpack(codes, scales, format, parameter.shape, torch.float32))
                num_replaced += 1
    assert num_replaced == 3 * 7
    return model


def batch(seed: int = 0, rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (rows, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def offloaded(model: nn.Module, frozen_weights: str | None = "int4", **options: Any) -> Any:
    options.setdefault("weights", "host")
    return outcore.offload(model, device="cpu", frozen_weights=frozen_weights, **options)


def trained(model: Any, seeds: Sequence[int] = (0, 1, 2)) -> tuple[list[float], dict[str, Tensor]]:
    """Train on the batch of each seed; return losses and adapters."""
    optimizer = outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = model(**batch(seed)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    adapters = {n: t.clone() for n, t in model.state_dict().items() if "lora_" in n}
    return losses, adapters
