"""Tiny models and data, and runs of a trainer over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

pytest.importorskip("accelerate", reason="needs accelerate")

NUM_TOKENS = 64


def llama(seed: int = 0, vocabulary: int = NUM_TOKENS, **changes: Any) -> Any:
    torch.manual_seed(seed)
    values = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **{**values, **changes}))


def gpt2() -> Any:
    """With dropout everywhere, biases, and a head that is tied to the embedding."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32,
        n_layer=3,
        n_head=2,
        vocab_size=NUM_TOKENS,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def lora(**options: Any) -> Any:
    """A Llama with adapters that do something from the start."""
    peft = pytest.importorskip("peft", reason="needs peft")
    values = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(llama(), peft.LoraConfig(**values))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def rows(num_rows: int = 48, length: int = 12) -> list[dict[str, Tensor]]:
    """Sequences that count up, some of them cut short, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, NUM_TOKENS, (num_rows,), generator=generator).tolist()
    made = []
    for index, start in enumerate(starts):
        ids = (torch.arange(length) * 3 + start) % NUM_TOKENS
        labels = ids.clone()
        labels[: index % 5] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def run(
    trainer_class: Any,
    folder: Path,
    *,
    model: Any = None,
    resume: Any = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Train, and return the trainer; ``more`` are arguments of the trainer itself."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(**{**values, **changes})
    others = {"train_dataset": rows(), "eval_dataset": rows(9), **(more or {})}
    if "model_init" not in others:
        others["model"] = llama() if model is None else model
    trainer = trainer_class(args=arguments, **others)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def logged(trainer: Any, names: tuple[str, ...] = LOGGED) -> list[tuple[int, str, float]]:
    return [
        (entry["step"], name, entry[name])
        for entry in trainer.state.log_history
        for name in names
        if name in entry
    ]


def assert_same_curve(found: Any, expected: Any, names: tuple[str, ...] = LOGGED) -> None:
    """Losses, norms and rates of two runs, entry by entry, to 1e-4 of themselves."""
    mine, theirs = logged(found, names), logged(expected, names)
    assert [entry[:2] for entry in mine] == [entry[:2] for entry in theirs]
    assert len(mine) >= 3
    for (step, name, value), (_, _, other) in zip(mine, theirs, strict=True):
        assert value == pytest.approx(other, rel=1e-4, abs=1e-7), f"{name} of step {step}"


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def state(trainer: Any) -> dict[str, Tensor]:
    """Everything that a run changes: weights and optimizer state."""
    saved = trainer.optimizer.state_dict()["state"]
    entries = {f"{i}.{k}": v.clone() for i, entry in saved.items() for k, v in entry.items()}
    return weights(trainer) | entries


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
