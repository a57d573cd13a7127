"""LoRA over a base that is streamed in 4 or 8 bit: speed and memory, with the plan beside them.

    python benchmarks/lora_72b.py --json FILE [--frozen-weights int4|int8|none] [--rank 16] ...

The model is born offloaded: blocks are drawn on the device one by one and go to the host packed, so
that the whole base (145 GB in bf16 for Qwen2.5-72B) never exists anywhere. Adapters of PEFT are on
every linear layer of the blocks. Weights are random and so is the batch; speed does not depend on
either.

How operations are counted. Frozen weights get no gradient, so a token counts 4 operations for each
parameter of blocks and head (2 in the forward, 2 for the gradient of the input) instead of 6.
Attention is counted at the same 4/6 of its usual term, 6 · layers · sequences · seq_len² · hidden.
Adapters and recomputation count nothing. ``tflops_without_attention`` leaves attention out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

import outcore
from outcore.bench.peers.measure import forget_building, synchronize
from outcore.cli.machine import machine_facts
from outcore.model_config import read_config
from outcore.model_spec import ModelSpec, model_spec
from outcore.planning.plan_json import plan_to_dict
from outcore.shapes import shape_config, shape_names
from outcore.views.side_by_side import Measurement, side_by_side

COUNTED = (
    "4 x (block + head parameters) x tokens + 4 x layers x sequences x seq_len^2 x hidden: frozen "
    "weights have no gradient of their own, attention at 4/6 of the usual term; adapters and "
    "recomputation count nothing"
)


def main(words: list[str] | None = None) -> dict[str, Any]:
    arguments = _arguments(words)
    config = _config(arguments.model)
    base = model_spec(config)
    adapters = LoraConfig(r=arguments.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    frozen = None if arguments.frozen_weights == "none" else arguments.frozen_weights
    is_cuda = torch.cuda.is_available()
    start = time.perf_counter()
    plan = outcore.plan(
        config,
        adapters=adapters,
        frozen_weights=frozen,
        tokens=arguments.sequences * arguments.seq_len,
        seq_len=arguments.seq_len,
        machine=arguments.machine,
        device_memory=arguments.device_memory,
        host_memory=arguments.host_memory,
        dtype="bf16" if is_cuda else "fp32",
    )
    planned = time.perf_counter()
    torch.manual_seed(0)
    device = "cuda" if is_cuda else "cpu"
    model = outcore.from_config(config, adapters=adapters, plan=plan, device=device)
    model.train()
    optimizer = outcore.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    built = time.perf_counter()
    rss_built_bytes = _status_bytes("VmHWM")
    print(f"planned in {planned - start:.1f} s, built in {built - planned:.1f} s", flush=True)
    ids = torch.randint(0, base.vocabulary, (arguments.sequences, arguments.seq_len), device=device)
    forget_building()
    steps_s, losses = [], []
    for step in range(arguments.warmup_steps + arguments.steps):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        synchronize()
        steps_s.append(time.perf_counter() - begin)
        print(f"step {step}: {steps_s[-1]:.2f} s, loss {losses[-1]:.4f}", flush=True)
    optimizer.synchronize()
    step_s = statistics.median(steps_s[arguments.warmup_steps :])
    report = _report(model, base, arguments, step_s)
    report |= {
        "steps_s": steps_s,
        "losses": losses,
        "planning_s": planned - start,
        "building_s": built - planned,
        "host_rss_peak_when_built_bytes": rss_built_bytes,
        "machine": machine_facts(),
    }
    print(
        f"{report['tflops']:.1f} TFLOPS  {report['tokens_per_s']:.0f} tokens/s  "
        f"device {report['device_peak_bytes'] / 2**30:.1f} GiB  "
        f"host {report['host_rss_bytes'] / 2**30:.1f} GiB"
    )
    arguments.json.write_text(json.dumps(report, indent=1))
    return report


def _report(
    model: Any, base: ModelSpec, arguments: argparse.Namespace, step_s: float
) -> dict[str, Any]:
    engine = outcore.engine_of(model)
    tokens = arguments.sequences * arguments.seq_len
    products = 4 * base.active_parameters * tokens
    attention = 4 * len(base.blocks) * tokens * arguments.seq_len * base.hidden_size
    plan = engine.plan
    assert plan is not None
    books = Measurement(
        step_s=step_s, peak_bytes={tier.tier: tier.peak_bytes for tier in engine.report()}
    )
    return {
        "model": str(arguments.model),
        "parameters": base.num_parameters,
        "adapter_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "frozen_weights": arguments.frozen_weights,
        "tokens": tokens,
        "seq_len": arguments.seq_len,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tflops": (products + attention) / step_s / 1e12,
        "tflops_without_attention": products / step_s / 1e12,
        "counted": COUNTED,
        "device_memory": arguments.device_memory,
        "device_peak_bytes": engine.device_peak_bytes(),
        "device_reserved_bytes": torch.cuda.max_memory_reserved()
        if torch.cuda.is_available()
        else 0,
        "host_rss_bytes": _status_bytes("VmHWM"),
        "device_purposes_bytes": engine.device_ledger.peaks(),
        "host_purposes_bytes": engine.host_ledger.peaks(),
        "prediction": {
            row.what: {"predicted": row.predicted, "measured": row.measured}
            for row in side_by_side(plan, books)
        },
        "plan": plan_to_dict(replace(plan, prediction=replace(plan.prediction, timeline=()))),
    }


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--model", default="qwen2.5-72b", help="a shape, or a config.json")
    parser.add_argument("--frozen-weights", choices=("int4", "int8", "none"), default="int4")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device-memory", default="24GiB")
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--machine", default="here", help="that the plan is made for")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup-steps", type=int, default=2)
    return parser.parse_args(words)


def _config(name: str) -> Any:
    return shape_config(name) if name in shape_names() else read_config(Path(name))


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
