"""The embedded job: a small Llama, larger than the device memory it is given, learns to add.

Everything is made on the spot: a tokenizer of single characters, random weights, and all sums of
two numbers of two digits, a tenth of them held out. Then it is an ordinary run, and the judgement
is on the directory that the run wrote.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import outcore
from outcore.engine.offload import engine_of
from outcore.train.settings import TrainSettings

SYMBOLS = "0123456789+=\n"
NUM_DIGITS = 2
NUM_HELD_OUT = 1000
NEEDED_ACCURACY = 0.9
SEQ_LEN = 64
TRAINING_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments


@dataclass(frozen=True, kw_only=True)
class DemoSize:
    """A model for a kind of device, the budget that it has to make do with, and how it learns."""

    hidden_size: int
    num_layers: int
    device_memory: str
    lr: float
    num_steps: int
    micro_batch: int | None = None
    num_rows: int = 12


SIZES = {
    "cpu": DemoSize(
        hidden_size=128,
        num_layers=6,
        device_memory="11.5MiB",
        lr=1.5e-3,
        num_steps=650,
        micro_batch=3,
        num_rows=6,
    ),
    # CUDA's own buffers would not fit into the budget above, so model and budget are larger.
    "cuda": DemoSize(
        hidden_size=768, num_layers=12, device_memory="768MiB", lr=5e-4, num_steps=1000
    ),
}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The files of the job, and what to judge it by."""

    settings: TrainSettings
    held_out: tuple[tuple[str, str], ...]  # problems with their answers
    training_bytes: int  # what an ordinary run would hold on the device

    def accuracy(self, directory: str) -> float:
        """Return the share of held-out problems that the model in ``directory`` solves."""
        return self.share_right(self.answers(directory))

    def answers(self, directory: str) -> list[str]:
        """Return what the model in ``directory`` says to the held-out problems."""
        model = outcore.load(
            directory,
            device=self.settings.device,
            device_memory=self.settings.device_memory,
            weights="host",
            state="host",
            dtype=torch.float32,
            compile=False,
        )
        try:
            return solve(model, _tokenizer(), [problem for problem, _ in self.held_out])
        finally:
            engine_of(model).close()

    def share_right(self, answers: list[str]) -> float:
        right = sum(a == b for a, (_, b) in zip(answers, self.held_out, strict=True))
        return right / len(self.held_out)


def make_demo(folder: Path, *, device: str, seed: int = 0, num_steps: int | None = None) -> Demo:
    """Write model, tokenizer and problems into ``folder`` and return the job."""
    size = SIZES[torch.device(device).type]
    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    model = LlamaForCausalLM(_config(size))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    problems = [
        (_problem(a, b), _written(a + b, NUM_DIGITS + 1))
        for a in range(10**NUM_DIGITS)
        for b in range(10**NUM_DIGITS)
    ]
    random.Random(seed).shuffle(problems)
    rows = (
        json.dumps({"prompt": problem, "completion": answer}) + "\n"
        for problem, answer in problems[NUM_HELD_OUT:]
    )
    (folder / "sums.jsonl").write_text("".join(rows), encoding="utf-8")
    settings = TrainSettings(
        model=str(folder / "model"),
        data=(str(folder / "sums.jsonl"),),
        output=str(folder / "trained"),
        max_steps=num_steps or size.num_steps,
        tokens_per_step=size.num_rows * SEQ_LEN,
        micro_batch=size.micro_batch,
        seq_len=SEQ_LEN,
        lr=size.lr,
        schedule="linear",
        warmup=50,
        min_lr=0.02,
        beta2=0.99,
        seed=seed,
        num_workers=1,
        log_every=50,
        tensorboard=False,
        device=device,
        device_memory=size.device_memory,
    )
    return Demo(
        settings=settings,
        held_out=tuple(problems[:NUM_HELD_OUT]),
        training_bytes=TRAINING_BYTES_PER_PARAMETER * model.num_parameters(),
    )


@torch.no_grad()
def solve(model: Any, tokenizer: Any, problems: list[str]) -> list[str]:
    """Return the model's own answers, decoded greedily."""
    device = engine_of(model).device
    ids = torch.tensor([tokenizer(problem + "\n")["input_ids"] for problem in problems])
    num_given, ids = ids.shape[1], ids.to(device)
    for _ in range(NUM_DIGITS + 1):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [tokenizer.decode(row).replace(" ", "") for row in ids[:, num_given:].tolist()]


def readable(problem: str, answer: str) -> str:
    """Return "23 + 58 = 81" for "32+85=" and "180"."""
    left, right = problem.rstrip("=").split("+")
    return " ".join([_number(left), "+", _number(right), "=", _number(answer)])


def _problem(a: int, b: int) -> str:
    return f"{_written(a, NUM_DIGITS)}+{_written(b, NUM_DIGITS)}="


def _written(number: int, num_digits: int) -> str:
    """Units come first, as one adds on paper."""
    return f"{number:0{num_digits}d}"[::-1]


def _number(digits: str) -> str:
    return digits[::-1].lstrip("0") or "0"


def _tokenizer() -> Any:
    core = Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate([*SYMBOLS, "<end>"])}, "<end>")
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def _config(size: DemoSize) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(SYMBOLS) + 1,
        hidden_size=size.hidden_size,
        intermediate_size=4 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.hidden_size // 32,
        max_position_embeddings=SEQ_LEN,
        # The usual 0.02 is made for wide models: a narrow one would learn half as fast.
        initializer_range=0.7 * size.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=len(SYMBOLS),
    )
