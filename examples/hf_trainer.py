"""transformers' Trainer with a model that need not fit on the device: evaluation, saving, resuming.

The change to a script that has a Trainer: ``outcore.hf.Trainer`` in its place.

    python examples/hf_trainer.py
    python examples/hf_trainer.py --model DIR --device-memory 24GiB --output DIR
    python examples/hf_trainer.py --output DIR --resume     # go on from the last checkpoint
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainingArguments

import outcore.hf

TINY = LlamaConfig(
    vocab_size=256,  # bytes
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LENGTH = 24


def sums(model: str | None) -> list[dict[str, Tensor]]:
    """Sentences such as "3 plus 4 is 7." as tokens; the padding does not count for the loss."""
    texts = [f"{a} plus {b} is {a + b}." for a in range(10) for b in range(10)]
    if model is None:
        rows = [list(text.encode()) for text in texts]
    else:
        rows = AutoTokenizer.from_pretrained(model)(texts)["input_ids"]
    return [
        {
            "input_ids": torch.tensor((row + [0] * LENGTH)[:LENGTH]),
            "labels": torch.tensor((row + [-100] * LENGTH)[:LENGTH]),
            "attention_mask": torch.arange(LENGTH).lt(len(row)).long(),
        }
        for row in rows
    ]


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face directory or Hub id; a tiny Llama without")
    parser.add_argument("--device-memory", help="a budget such as 24GiB; what is free without")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", help="where checkpoints and the model go")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args(arguments)
    output = options.output or tempfile.mkdtemp(prefix="hf_trainer-")

    torch.manual_seed(0)
    if options.model is None:
        model = AutoModelForCausalLM.from_config(TINY)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    rows = sums(options.model)
    trainer = outcore.hf.Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=20,
            learning_rate=3e-3 if options.model is None else 1e-5,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            max_grad_norm=1.0,
            bf16=torch.cuda.is_available(),
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=2,
            report_to=[],
        ),
        train_dataset=rows[10:],
        eval_dataset=rows[:10],
        offload={"device_memory": options.device_memory},
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(output)
    print(f"saved to {output}")
    return trainer


if __name__ == "__main__":
    main()
