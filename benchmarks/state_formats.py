"""Trains one language model with fp32, compact and minimal optimizer state, from the same start.

    python benchmarks/state_formats.py --text FILE [FILE ...] --json FILE [--steps 2000]

Byte-level, a Llama of 25 M parameters by default, on real text: every file is cut into a training
part and its last tenth, which is held out. The three runs differ in ``state_format`` alone: same
initial weights, same batches, clipping, schedule. Writes the curves, the final losses (mean of the
last 100 steps, and held out) and by how much compact and minimal differ from fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

import outcore
from outcore.cli.machine import machine_facts
from outcore.optim.state_format import FORMAT_NAMES

VOCABULARY = 256
LAST_STEPS = 100
EVALUATION_BATCHES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain text files")
    parser.add_argument("--json", type=Path, required=True, help="where curves and losses go")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default=",".join(FORMAT_NAMES), help="with commas")
    arguments = parser.parse_args()
    training, held_out = read_text(arguments.text)
    report: dict[str, Any] = {
        "machine": machine_facts(),
        "settings": {key: str(value) for key, value in vars(arguments).items()},
        "training_bytes": training.numel(),
        "held_out_bytes": held_out.numel(),
        "runs": {},
    }
    for state_format in arguments.formats.split(","):
        report["runs"][state_format] = run(state_format, training, held_out, arguments)
        report["differences"] = differences(report["runs"])
        arguments.json.write_text(json.dumps(report, indent=1))
        last = report["runs"][state_format]
        print(
            f"{state_format:8s} training {last['final_loss']:.4f}  held out "
            f"{last['held_out_loss']:.4f}  {last['seconds']:.0f} s  "
            f"{last['num_parameters'] / 1e6:.1f} M parameters",
            flush=True,
        )
    print(json.dumps(report["differences"], indent=1))


def read_text(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those held out."""
    training, held_out = [], []
    for file in files:
        text = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        cut = text.numel() * 9 // 10
        training.append(text[:cut])
        held_out.append(text[cut:])
    return torch.cat(training), torch.cat(held_out)


def run(
    state_format: str, training: Tensor, held_out: Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=arguments.seq_len,
    )
    model = outcore.from_config(
        config,
        device=device,
        weights="host",
        state="host",
        dtype=torch.bfloat16,
        state_format=state_format,
    )
    model.train()
    optimizer = outcore.AdamW(
        model,
        lr=arguments.lr,
        betas=(0.9, 0.999),
        weight_decay=0.1,
        max_grad_norm=1.0,
        rounding_seed=arguments.seed,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, arguments.steps)
    )
    draw = torch.Generator().manual_seed(arguments.seed)
    losses: list[Tensor] = []
    start = time.perf_counter()
    for _ in range(arguments.steps):
        ids = batch(training, arguments, draw).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - start
    curve = [float(loss) for loss in losses]
    found = {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "final_loss": sum(curve[-LAST_STEPS:]) / len(curve[-LAST_STEPS:]),
        "held_out_loss": evaluate(model, held_out, arguments, device),
        "seconds": seconds,
        "curve": curve,
    }
    outcore.release(model)
    return found


def learning_rate(step: int, num_steps: int) -> float:
    """A tenth of warm-up, then a cosine to a tenth."""
    warm_up = max(1, num_steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def batch(text: Tensor, arguments: argparse.Namespace, draw: torch.Generator) -> Tensor:
    starts = torch.randint(
        0, text.numel() - arguments.seq_len, (arguments.sequences,), generator=draw
    )
    return torch.stack([text[start : start + arguments.seq_len] for start in starts.tolist()])


def evaluate(model: Any, held_out: Tensor, arguments: argparse.Namespace, device: str) -> float:
    model.eval()
    draw = torch.Generator().manual_seed(1)
    total = 0.0
    with torch.no_grad():
        for _ in range(EVALUATION_BATCHES):
            ids = batch(held_out, arguments, draw).to(device)
            total += float(model(input_ids=ids, labels=ids).loss)
    return total / EVALUATION_BATCHES


def differences(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return by what share each format's losses are above those of fp32."""
    if "fp32" not in runs:
        return {}
    return {
        name: {
            loss: found[loss] / runs["fp32"][loss] - 1 for loss in ("final_loss", "held_out_loss")
        }
        for name, found in runs.items()
        if name != "fp32"
    }


if __name__ == "__main__":
    main()
