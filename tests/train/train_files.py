"""A tiny model directory and a data file, and settings that point at them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers_made_here import CHATML, chat, make_tokenizer, write_jsonl
from transformers import LlamaConfig, LlamaForCausalLM

from outcore.train.figures import StepFigures
from outcore.train.settings import TrainSettings

WORDS = ["the", "cat", "sat", "on", "mat", "and", "said", "hello", "to", "world"]


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a run is pointed at."""

    folder: Path
    model: Path
    data: Path

    def settings(self, name: str = "out", **changes: object) -> TrainSettings:
        values = {
            "model": str(self.model),
            "data": (str(self.data),),
            "output": str(self.folder / name),
            "cache_dir": str(self.folder / "tokens"),
            "max_steps": 6,
            "tokens_per_step": 256,
            "seq_len": 64,
            "lr": 1e-3,
            "num_workers": 1,
            "device": "cpu",
            "device_memory": "1GiB",  # a part of memory that stands for a device's: copies are made
            "tensorboard": False,
        }
        return TrainSettings(**{**values, **changes})  # type: ignore[arg-type]


def write_model(folder: Path, hidden_size: int = 32) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(CHATML)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_dropout=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, count: int = 200, seed: int = 0) -> Path:
    chosen = random.Random(seed)
    rows = []
    for _ in range(count):
        words = chosen.choices(WORDS, k=chosen.randint(3, 9))
        rows.append({"messages": chat(" ".join(words), " ".join(reversed(words)))})
    return write_jsonl(path, rows)


def step_figures(step: int, step_s: float, num_steps: int = 1000) -> StepFigures:
    """A step as a display is told of it; of its values only these matter."""
    return StepFigures(
        step=step,
        num_steps=num_steps,
        loss=2.0,
        grad_norm=1.0,
        lr=1e-5,
        step_s=step_s,
        tokens_per_s=1.0,
        tflops=1.0,
        data_wait_s=0.0,
        epoch=0.0,
    )
