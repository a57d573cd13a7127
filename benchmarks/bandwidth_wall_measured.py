"""Streamed steps beside resident ones on this machine, over tokens a step: measured and predicted.

    python benchmarks/bandwidth_wall_measured.py --json FILE [--shapes qwen2.5-3b,qwen2.5-7b]

The same two placements as in bandwidth_wall.py, everything on the host and everything on the
device, both with full recomputation, each built once and run at every number of tokens. The
predictions are for this machine as its probe has it. "Share" is streamed speed over resident speed.
Behind the steps that are timed, two are recorded: how long each lane was busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import outcore
from outcore.bench.peers.measure import synchronize
from outcore.cli.machine import machine_facts
from outcore.machine import machine_named
from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec, model_spec
from outcore.planning.choices import Choice
from outcore.planning.plan import Job, Plan
from outcore.planning.search import plan_of
from outcore.shapes import shape_config
from outcore.views.side_by_side import busy_s

SEQ_LEN = 1024
MICRO_BATCH = 8
WARMUP_STEPS, STEPS = 3, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--shapes", default="qwen2.5-3b,qwen2.5-7b", help="with commas")
    parser.add_argument("--tokens", default="65536,32768,16384,8192", help="with commas")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    all_tokens = [int(tokens) for tokens in arguments.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes.split(","):
        for clips in (False, True):
            found = [
                measure(shape, streamed, clips, all_tokens, arguments.device)
                for streamed in (False, True)
            ]
            for resident, streamed in zip(*found, strict=True):
                rows.append(
                    {"shape": shape, "clips": clips, "resident": resident, "streamed": streamed}
                )
                print(summary(rows[-1]), flush=True)
            text = json.dumps({"machine": machine_facts(), "rows": rows}, indent=1)
            arguments.json.write_text(text)


def measure(
    shape: str, streamed: bool, clips: bool, all_tokens: list[int], device: str
) -> list[dict[str, Any]]:
    """Return the step times of one placement, measured and predicted, for each number of tokens."""
    config, machine = shape_config(shape), machine_named("here")
    spec = model_spec(config)
    dtype = "bf16" if device == "cuda" else "fp32"
    plans = [planned(spec, machine, streamed, clips, tokens, dtype) for tokens in all_tokens]
    torch.manual_seed(0)
    model = outcore.from_config(
        config, device=device, plan=max(plans, key=lambda plan: plan.job.tokens)
    )
    optimizer = outcore.AdamW(
        model,
        lr=1e-5,
        max_grad_norm=1.0 if clips else None,
        update_during_backward=not clips,
    )
    rows = []
    for tokens, plan in zip(all_tokens, plans, strict=True):
        ids = torch.randint(0, config.vocab_size, (tokens // SEQ_LEN, SEQ_LEN), device=device)
        run_steps(model, optimizer, ids, WARMUP_STEPS)
        steps_s = run_steps(model, optimizer, ids, STEPS)
        with outcore.record(model) as record:
            run_steps(model, optimizer, ids, 2)
        rows.append(
            {
                "tokens": tokens,
                "measured_s": statistics.fmean(steps_s),
                "steps_s": steps_s,
                "predicted_s": plan.prediction.step_s,
                "busy_s": busy_s(record.measurement().spans),
                "predicted_busy_s": plan.prediction.busy_s,
            }
        )
    outcore.engine_of(model).close()
    del model, optimizer
    gc.collect()
    return rows


def run_steps(model: Any, optimizer: outcore.AdamW, ids: torch.Tensor, count: int) -> list[float]:
    """Return the wall times of steps, which together hold what the device did for all of them.

    What the host still updates at the end, the steps before had left behind as well.
    """
    synchronize()
    walls_s, start = [], time.perf_counter()
    for index in range(count):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if index == count - 1:
            synchronize()
        walls_s.append(time.perf_counter() - start - sum(walls_s))
    return walls_s


def planned(
    spec: ModelSpec, machine: Machine, streamed: bool, clips: bool, tokens: int, dtype: Any
) -> Plan:
    n = len(spec.blocks)
    resident = Choice(first_device_weights=n, first_device_state=n, edge_state=0)
    choice = Choice(num_visits=3) if streamed else resident
    job = Job(tokens=tokens, seq_len=SEQ_LEN, dtype=dtype, clipping="waiting" if clips else "none")
    return plan_of(spec, machine, job, choice.placement(n, MICRO_BATCH))


def summary(row: dict[str, Any]) -> str:
    resident, streamed = row["resident"], row["streamed"]
    shares = {
        what: resident[f"{what}_s"] / streamed[f"{what}_s"] for what in ("measured", "predicted")
    }
    return (
        f"{row['shape']:12s} {'clipping   ' if row['clips'] else 'no clipping'} "
        f"{resident['tokens']:7,d} tokens  resident {resident['measured_s']:6.3f} s "
        f"({resident['predicted_s']:6.3f} predicted)  streamed {streamed['measured_s']:6.3f} s "
        f"({streamed['predicted_s']:6.3f})  share {shares['measured']:.2f} "
        f"({shares['predicted']:.2f})"
    )


if __name__ == "__main__":
    main()
