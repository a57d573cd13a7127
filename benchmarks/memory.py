"""Compares the bytes that a plan predicts for the CPU device with those of a run.

    python benchmarks/memory.py --json FILE [--only llama,gpt2] [--lengths 128,512]

Each row is a small model whose blocks live on the host: a plan is made for it, two steps are taken,
and a third is watched by torch's memory profiler. "books" is what the engine's report says of the
device. "measured" is what was there: what the books hold between steps, and the most that the
allocator had at a time within a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

import outcore
from outcore.cli.machine import machine_facts
from outcore.machine import machine_named
from outcore.model_spec import spec_of_model
from outcore.planning.choices import Choice
from outcore.planning.micro_batch import pick_micro_batch
from outcore.planning.plan import Job, Plan
from outcore.planning.search import plan_of

IN_A_STEP = ("block inputs", "kept activations", "working memory")
MOVES = {
    "recompute": Choice(),
    "keep": Choice(last_kept=4),
    "offload": Choice(offloads_inputs=1),
}


def configs(hidden: int, heads: int, vocabulary: int) -> dict[str, Any]:
    usual = {
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }
    return {
        "llama": LlamaConfig(**usual),
        "qwen2": Qwen2Config(**usual),
        "gemma3": Gemma3TextConfig(
            **usual, head_dim=hidden // heads, sliding_window=256, sliding_window_pattern=2
        ),
        "gpt2": GPT2Config(
            n_embd=hidden, n_head=heads, n_layer=4, n_positions=4096, vocab_size=vocabulary
        ),
    }


# Hidden size, heads and vocabulary. With so few words blocks take more than the loss does.
SIZES = {"tiny": (64, 4, 512), "small": (256, 8, 8192), "few-words": (256, 8, 64)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting; bytes of the device unless they say otherwise."""

    family: str
    size: str
    sequences: int
    seq_len: int
    activations: str
    is_packed: bool
    predicted: int
    books: int
    measured: int
    predicted_in_step: dict[str, int]
    measured_in_step: int
    host_predicted: int
    host_books: int

    @property
    def line(self) -> str:
        return (
            f"{self.family:7}{self.size:10}{self.sequences:2} x {self.seq_len:<5}"
            f"{self.activations:10}{'packed' if self.is_packed else '':7}"
            f"{self.predicted / 1e6:9.2f} {self.measured / 1e6:9.2f}"
            f" {self.predicted / self.measured - 1:+6.0%} {self.books / 1e6:9.2f}"
            f" {self.predicted / self.books - 1:+6.0%}"
            f"   in a step {sum(self.predicted_in_step.values()) / 1e6:8.2f}"
            f" {self.measured_in_step / 1e6:8.2f}"
            f"   host {self.host_predicted / self.host_books - 1:+6.1%}"
        )


def batch_of(sequences: int, seq_len: int, vocabulary: int, *, is_packed: bool) -> dict[str, Any]:
    ids = torch.randint(0, vocabulary, (sequences, seq_len))
    positions = torch.arange(seq_len)
    if is_packed:
        positions = positions % (seq_len // 4 + 3)
    return {"input_ids": ids, "labels": ids, "position_ids": positions.repeat(sequences, 1)}


def most_in_use(step: Callable[[], None]) -> int:
    """Return the most bytes that were allocated at a time by this thread during ``step``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    tree, in_use, most = [*found.profiler.kineto_results.experimental_event_tree()], 0, 0
    events = []
    while tree:
        event = tree.pop()
        tree += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
    here: set[int] = set()
    for _, pointer, size in sorted(events, key=lambda e: e[0]):
        if size > 0:
            here.add(pointer)
        elif pointer not in here:
            continue  # it was there before
        else:
            here.remove(pointer)
        in_use += size
        most = max(most, in_use)
    return most


def plan_for(model: Any, sequences: int, seq_len: int, activations: str, is_packed: bool) -> Plan:
    spec = spec_of_model(model)
    job = Job(tokens=sequences * seq_len, seq_len=seq_len, dtype="fp32", is_masked=is_packed)
    machine = replace(machine_named("h200-pcie5"), device_name="CPU: any")
    micro_batch = pick_micro_batch(sequences, seq_len, device_type="cpu")
    placement = MOVES[activations].placement(len(spec.blocks), micro_batch)
    return plan_of(spec, machine, job, placement)


def measure(
    family: str, size: str, sequences: int, seq_len: int, activations: str, *, is_packed: bool
) -> Row:
    torch.manual_seed(0)
    hidden, heads, vocabulary = SIZES[size]
    model = AutoModelForCausalLM.from_config(configs(hidden, heads, vocabulary)[family]).train()
    plan = plan_for(model, sequences, seq_len, activations, is_packed)
    model = outcore.offload(model, plan=plan, device="cpu")
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    batch = batch_of(sequences, seq_len, vocabulary, is_packed=is_packed)

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outcore.synchronize(model)

    step()
    step()
    in_step = most_in_use(step)
    device, host = outcore.engine_of(model).report()[:2]
    between = sum(n for purpose, n in device.purposes.items() if purpose not in IN_A_STEP)
    planned = plan.peak_bytes["device"]
    row = Row(
        family=family,
        size=size,
        sequences=sequences,
        seq_len=seq_len,
        activations=activations,
        is_packed=is_packed,
        predicted=plan.tier_bytes("device"),
        books=device.peak_bytes,
        measured=between + in_step,
        predicted_in_step={p: planned[p] for p in IN_A_STEP if p in planned},
        measured_in_step=in_step,
        host_predicted=plan.tier_bytes("host"),
        host_books=host.peak_bytes,
    )
    outcore.release(model)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="llama,qwen2,gemma3,gpt2")
    parser.add_argument("--sizes", default="tiny,small")
    parser.add_argument("--lengths", default="128,512,1024")
    parser.add_argument("--activations", default="recompute,keep,offload")
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    rows: list[Row] = []
    print("                                             predicted  measured   off     books   off")
    for family in given.only.split(","):
        for size in given.sizes.split(","):
            for seq_len in map(int, given.lengths.split(",")):
                for activations in given.activations.split(","):
                    for is_packed in (False, True):
                        row = measure(
                            family,
                            size,
                            max(1, given.tokens // seq_len),
                            seq_len,
                            activations,
                            is_packed=is_packed,
                        )
                        rows.append(row)
                        print(row.line, flush=True)
    if given.json is not None:
        found = {"machine": machine_facts(), "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
