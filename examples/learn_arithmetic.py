"""Teach addition to a model that is larger than the device memory it is given.

A small Llama learns to add two numbers of two digits, and is then asked for sums that it never
saw. Weights and optimizer state live in host memory and stream through the device a block at a
time. Without a GPU the CPU plays the device, under the same enforced budget.

    python examples/learn_arithmetic.py            # or: make demo
    python examples/learn_arithmetic.py --help
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig

import outcore
from outcore.units import format_bytes, parse_bytes

SYMBOLS = "0123456789+="
NUM_DIGITS = 2
PROMPT_LENGTH = 2 * NUM_DIGITS + 2  # "32+85=" is 23 + 58
NUM_HELD_OUT = 1000
BATCH = 64
WARMUP_STEPS = 50
NEEDED_ACCURACY = 0.9
TRAINING_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model for a kind of device, the budget that it has to make do with, and how it learns."""

    hidden_size: int
    num_layers: int
    device_memory: str
    dtype: torch.dtype
    lr: float
    steps: int


SIZES = {
    "cpu": Size(
        hidden_size=128,
        num_layers=6,
        device_memory="9MiB",
        dtype=torch.float32,
        lr=1.5e-3,
        steps=500,
    ),
    # CUDA's own buffers would not fit into the budget above, so model and budget are larger.
    "cuda": Size(
        hidden_size=768,
        num_layers=12,
        device_memory="768MiB",
        dtype=torch.bfloat16,
        lr=5e-4,
        steps=1000,
    ),
}


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same run.")] = 0,
    device_memory: Annotated[str | None, typer.Option(help="The budget, e.g. 9MiB.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")
    ] = None,
) -> None:
    """Teach addition to a model that is larger than the device memory it is given."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[device]
    budget = device_memory or size.device_memory
    try:
        passed = learn(device, size, budget, steps or size.steps, seed, json_file)
    except (outcore.OutOfBudget, ValueError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from None
    raise typer.Exit(0 if passed else 1)


def learn(
    device: str, size: Size, budget: str, steps: int, seed: int, json_file: Path | None
) -> bool:
    """Train, tell what happens, and return whether the model has learned to add."""
    torch.manual_seed(seed)
    training, held_out = split_problems(seed)
    model = outcore.from_config(
        make_config(size),
        device=device,
        device_memory=budget,
        weights="host",
        state="host",
        dtype=size.dtype,
        compile=False,
    )
    optimizer = outcore.AdamW(model, lr=size.lr, betas=(0.9, 0.99), max_grad_norm=1.0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    needed_bytes = num_parameters * TRAINING_BYTES_PER_PARAMETER
    console.print(
        f"A Llama of {num_parameters / 1e6:.1f} M parameters takes [bold]"
        f"{format_bytes(needed_bytes)}[/] to train; the {device} device gets [bold]"
        f"{format_bytes(parse_bytes(budget))}[/]. Host memory holds the rest.\n"
        f"It learns sums from {len(training):,} problems; {len(held_out):,} others are held out."
    )

    before = accuracy(model, held_out)
    console.print(f"Held-out problems solved before: [bold]{before:.1%}[/]")
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    losses = train(model, optimizer, training, steps=steps, seed=seed)
    train_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    after = accuracy(model, held_out)

    tiers = outcore.engine_of(model).report()
    show_homes(tiers, needed_bytes)
    show_answers(model, held_out[:5])
    passed = after >= NEEDED_ACCURACY
    console.print(
        f"[bold {'green' if passed else 'red'}]Held-out problems solved: {before:.1%} before, "
        f"{after:.1%} after {steps} steps in {train_s:.0f} s[/]"
        + ("" if passed else f" ({NEEDED_ACCURACY:.0%} were expected)")
    )
    if json_file is not None:
        figures = {
            "accuracy_before": before,
            "accuracy_after": after,
            "losses": losses,
            "train_s": train_s,
            "cpu_s": cpu_s,
            "num_parameters": num_parameters,
            "training_bytes": needed_bytes,
            "tiers": [asdict(tier) for tier in tiers],
        }
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return passed


def make_config(size: Size) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=size.hidden_size,
        intermediate_size=4 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.hidden_size // 32,
        max_position_embeddings=32,
        # The usual 0.02 is made for wide models: a narrow one would learn half as fast.
        initializer_range=0.7 * size.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=None,
    )


def split_problems(seed: int) -> tuple[Tensor, Tensor]:
    """Return all problems as tokens, shuffled and cut into training and held-out ones."""
    numbers = torch.arange(10**NUM_DIGITS)
    problems = encode(*torch.cartesian_prod(numbers, numbers).unbind(1))
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed))
    return problems[order[NUM_HELD_OUT:]], problems[order[:NUM_HELD_OUT]]


def encode(a: Tensor, b: Tensor) -> Tensor:
    """Return "32+85=180" for 23 + 58 = 81: units come first, as one adds on paper."""
    left, right = digits(a, NUM_DIGITS), digits(b, NUM_DIGITS)
    plus, equals = (torch.full_like(a, SYMBOLS.index(s))[:, None] for s in "+=")
    return torch.cat([left, plus, right, equals, digits(a + b, NUM_DIGITS + 1)], dim=1)


def digits(numbers: Tensor, num_digits: int) -> Tensor:
    """Return the decimal digits, units first: [n] → [n, num_digits]."""
    return torch.stack([numbers // 10**place % 10 for place in range(num_digits)], dim=1)


def train(
    model: Any, optimizer: outcore.AdamW, problems: Tensor, *, steps: int, seed: int
) -> list[float]:
    """Run the steps behind a progress bar; return the losses."""
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARMUP_STEPS, max(0.02, 1 - step / steps)),
    )
    device = outcore.engine_of(model).device
    model.train()
    losses: list[float] = []
    start_s, num_tokens = time.perf_counter(), 0
    with progress_bar() as bar:
        task = bar.add_task("learning", total=steps, loss="", speed="")
        for ids in batches(problems, steps, seed):
            ids = ids.to(device)
            labels = ids.clone()
            labels[:, :PROMPT_LENGTH] = -100  # only the answer is to be learned
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            num_tokens += ids.numel()
            speed = num_tokens / (time.perf_counter() - start_s)
            bar.update(task, advance=1, loss=f"{losses[-1]:.3f}", speed=f"{speed:,.0f}")
    optimizer.synchronize()
    console.print(f"Loss {losses[0]:.3f} → {losses[-1]:.3f}, {speed:,.0f} tokens/s")
    return losses


def batches(problems: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        yield problems[torch.randint(len(problems), (BATCH,), generator=generator)]


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


@torch.no_grad()
def answers(model: Any, problems: Tensor) -> Tensor:
    """Return the prompts with the model's own digits behind them, decoded greedily."""
    model.eval()
    ids = problems[:, :PROMPT_LENGTH].to(outcore.engine_of(model).device)
    while ids.shape[1] < problems.shape[1]:
        logits = model(input_ids=ids, use_cache=False).logits  # [problems, tokens, symbols]
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids.cpu()


def accuracy(model: Any, problems: Tensor) -> float:
    """Return the share of problems whose every digit is right."""
    return float((answers(model, problems) == problems).all(dim=1).float().mean())


def show_homes(tiers: list[Any], needed_bytes: int) -> None:
    """Print what each tier held, at its peak."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Where everything lived")
    for header in ("tier", "what", "peak", "of the budget", "of all training bytes"):
        table.add_column(header, justify="left" if header in ("tier", "what") else "right")
    for tier in tiers:
        share = "–" if tier.budget_bytes is None else f"{tier.peak_bytes / tier.budget_bytes:.1%}"
        for purpose, num_bytes in tier.purposes.items():
            table.add_row(tier.tier, purpose, format_bytes(num_bytes), "", "")
        row = (tier.tier, "at most at a time", format_bytes(tier.peak_bytes))
        table.add_row(
            *row, share, f"{tier.peak_bytes / needed_bytes:.0%}", style="bold", end_section=True
        )
    console.print(table)


def show_answers(model: Any, problems: Tensor) -> None:
    for right, given in zip(problems.tolist(), answers(model, problems).tolist(), strict=True):
        a = written(given[:NUM_DIGITS])
        b = written(given[NUM_DIGITS + 1 : PROMPT_LENGTH - 1])
        mark = "[green]right[/]" if given == right else "[red]wrong[/]"
        console.print(f"  {a} + {b} = {written(given[PROMPT_LENGTH:])}  {mark}")


def written(tokens: list[int]) -> str:
    """Return a number's tokens, units first, as people write it."""
    return "".join(SYMBOLS[token] for token in reversed(tokens)).lstrip("0") or "0"


if __name__ == "__main__":
    typer.run(main)
