"""TRL's SFTTrainer with a model that need not fit on the device.

The change to a script that has an SFTTrainer is the class below, and ``offload=`` where it is used.

    python examples/trl_sft.py
    python examples/trl_sft.py --model DIR --device-memory 24GiB --output DIR
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import outcore.hf


class SFTTrainer(outcore.hf.Trainer, trl.SFTTrainer):
    """TRL's, over an offloaded model."""


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows single bytes, for the tiny model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<end>", *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


def start(directory: str | None) -> tuple[Any, Any]:
    """Return a model and its tokenizer; a tiny Llama without a directory."""
    if directory is not None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        return model, AutoTokenizer.from_pretrained(directory)
    tokenizer = bytes_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config), tokenizer


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face directory or Hub id; a tiny Llama without")
    parser.add_argument("--device-memory", help="a budget such as 24GiB; what is free without")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", help="where the model goes")
    options = parser.parse_args(arguments)
    output = options.output or tempfile.mkdtemp(prefix="trl_sft-")

    model, tokenizer = start(options.model)
    data = Dataset.from_list(
        [
            {"prompt": f"{a} plus {b} is", "completion": f" {a + b}."}
            for a in range(10)
            for b in range(10)
        ]
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=data,
        args=trl.SFTConfig(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=20,
            learning_rate=3e-3 if options.model is None else 1e-5,
            bf16=torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
        ),
        offload={"device_memory": options.device_memory},
    )
    trainer.train()
    trainer.save_model(output)
    print(f"saved to {output}")
    return trainer


if __name__ == "__main__":
    main()
