"""How much longer steps take while a checkpoint is written.

    python benchmarks/checkpoint.py [--layers 12] [--width 768] [--rounds 6] [--folder DIR]
    python benchmarks/checkpoint.py --shape qwen2.5-3b --device cuda --sequences 16 --seq-len 2048

Trains a Llama of about 100 M parameters on the CPU device, or a shape, with its state on the host:
steps without checkpoints, steps while one is being written, and what a synchronous one takes.
Prints one JSON object. On few cores the writer, the copies and the training share them: what is
measured there is the worst case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

import outcore
from outcore.bench.peers.measure import synchronize
from outcore.checkpoint import run_state
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.contents import checkpoint_bytes
from outcore.checkpoint.folder import CheckpointFolder
from outcore.cli.machine import machine_facts
from outcore.shapes import shape_config

NUM_STEPS_WITHOUT = 5  # before each checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", help="instead of --layers and --width")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6, help="checkpoints that are written")
    parser.add_argument("--folder", type=Path, help="for the checkpoints; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(measured(options, Path(folder)), indent=2))


def measured(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    config: Any = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=8192,
    )
    if options.shape is not None:
        config = shape_config(options.shape)
    torch.manual_seed(0)
    homes = {"weights": "host", "state": "host"}
    model: Any = outcore.from_config(config, device=options.device, **homes).train()
    optimizer = outcore.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    folder = CheckpointFolder(path, keep=1)
    checkpoints = AsyncCheckpoints(folder, model, optimizer)
    assert checkpoints.is_async, "needs more host memory"
    shape = (options.sequences, options.seq_len)

    def step() -> float:
        ids = torch.randint(0, config.vocab_size, shape, device=options.device)
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - start

    for _ in range(3):  # state settles after the first
        step()
    without, during, begins, writes, core_s = [], [], [], [], []
    # In turns, so that both see the same of whatever else the machine does.
    for _ in range(options.rounds):
        optimizer.synchronize()
        cores = time.process_time()
        plain = [step() for _ in range(NUM_STEPS_WITHOUT)]
        optimizer.synchronize()
        each_core_s = (time.process_time() - cores) / len(plain)
        without += plain
        start, cores, before = time.perf_counter(), time.process_time(), len(during)
        checkpoints.begin({})
        begins.append(time.perf_counter() - start)
        while checkpoints.is_writing:
            during.append(step())
        checkpoints.wait()
        optimizer.synchronize()
        steps = len(during) - before
        core_s.append(time.process_time() - cores - steps * each_core_s)
        writes.append(time.perf_counter() - start)
        print(
            f"{writes[-1]:.1f} s to write: {statistics.fmean(during[before:]):.3f} s a step, "
            f"{statistics.fmean(plain):.3f} before",
            file=sys.stderr,
            flush=True,
        )
    optimizer.synchronize()
    start = time.perf_counter()
    run_state.save(folder, model, optimizer, {})
    synchronous_s = time.perf_counter() - start
    checkpoints.close()
    plain_s, during_s = statistics.mean(without), statistics.mean(during)
    return {
        "machine": machine_facts(),
        "model": options.shape or "a Llama",
        "parameters": sum(p.numel() for p in model.parameters()),
        "checkpoint_bytes": checkpoint_bytes(model, optimizer),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "ms_per_step": round(1e3 * plain_s, 1),
        "ms_per_step_while_writing": round(1e3 * during_s, 1),
        "longer": round(during_s / plain_s - 1, 3),
        "longer_median": round(statistics.median(during) / statistics.median(without) - 1, 3),
        "each_ms_without": [round(1e3 * s, 1) for s in without],
        "each_ms_while_writing": [round(1e3 * s, 1) for s in during],
        "steps_without": len(without),
        "steps_while_writing": len(during),
        "ms_begin": round(1e3 * statistics.median(begins), 2),
        "core_s_of_a_checkpoint": round(statistics.median(core_s), 2),
        "load_average": os.getloadavg(),
        "s_written": round(statistics.median(writes), 2),
        "s_synchronous": round(synchronous_s, 2),
    }


if __name__ == "__main__":
    main()
