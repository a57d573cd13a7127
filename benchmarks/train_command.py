"""`outcore train` beside the bare engine: the same shape, plan, tokens and clipping.

The engine takes one batch of random tokens again and again (`outcore bench train` does the same);
`outcore train` reads, packs and shuffles real files, shows and writes figures, and steps. Each runs
in a process of its own. Steps are counted from the fifth on.

    python benchmarks/train_command.py --json FILE [--shape qwen2.5-7b] [--checkpoint DIR]
                                       [--engine PLANS.json]

With --engine the engine's step is the one of plans.py, measured there on the same machine just
before: the same job, after fewer steps of warm-up.

Without --data the sources of Python's standard library are the text. With --checkpoint the model is
written there first if it is not, and what the page cache has of it is dropped: the command then
loads it, and the seconds to the end of its first step count the whole of it. The same files are
read before and after it, without the command: into small buffers that nobody looks at, and from
there to as much memory. What it compiles, it compiles anew: it has none of what earlier runs on the
machine have compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from loading import evict, new_memory, read_files, touch

from outcore.bench.job import BenchFailure, BenchJob
from outcore.bench.peers.runner import run_peer
from outcore.cli.machine import machine_facts
from outcore.shapes import shape_dict

FIRST_STEP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--data", type=Path, help="a text file")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--checkpoint", type=Path, help="load the model from there")
    parser.add_argument("--engine", type=Path, help="what plans.py wrote, with a row of the shape")
    arguments = parser.parse_args()
    engine = engine_of(arguments.engine, arguments) if arguments.engine else run_engine(arguments)
    disk = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.checkpoint:
            write_checkpoint(arguments.shape, arguments.checkpoint)
            disk.append(read_rates(arguments.checkpoint))
        command = run_command(arguments, Path(folder))
        if arguments.checkpoint:
            disk.append(read_rates(arguments.checkpoint))
    report = {"machine": machine_facts(), "engine": engine, "train": command, "disk": disk}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    ratio = command["step_s"] / engine["step_s"]
    print(f"engine {engine['step_s']:.3f} s a step, outcore train {command['step_s']:.3f} s")
    print(f"outcore train takes {ratio - 1:+.1%}; waits for data {command['data_wait_s']:.4f} s")
    print(
        f"first step done {command['first_step_after_s']:.1f} s after the command, of which "
        f"{command['load_s']:.1f} s load the model"
    )
    for when, rates in zip(("before", "after"), disk, strict=False):
        load = rates["num_bytes"] / command["load_s"]
        print(
            f"loaded at {load / 1e9:.2f} GB/s; {when} it, reading alone "
            f"{rates['alone_bytes_s'] / 1e9:.2f} ({load / rates['alone_bytes_s']:.0%}), to memory "
            f"{rates['to_memory_bytes_s'] / 1e9:.2f} ({load / rates['to_memory_bytes_s']:.0%})"
        )


def run_engine(arguments: Any) -> dict[str, Any]:
    row = run_peer(
        "outcore",
        BenchJob(
            config=shape_dict(arguments.shape),
            sequences=arguments.sequences,
            seq_len=arguments.seq_len,
            steps=arguments.steps - FIRST_STEP,
            warmup_steps=FIRST_STEP - 1,
            max_grad_norm=1.0,
            plan_options={},
        ),
        limit_s=280,
    )
    if isinstance(row, BenchFailure):
        raise SystemExit(f"the engine failed: {row.failed}")
    return {"step_s": row.step_s, "all_step_s": row.all_step_s, "tflops": row.tflops}


def engine_of(file: Path, arguments: Any) -> dict[str, Any]:
    """Return the row of plans.py that ran the same job, by a plan for the whole machine."""
    rows = json.loads(file.read_text())["rows"]
    name = arguments.shape.removeprefix("qwen2.5-")
    row = next((row for row in rows if row["setting"] == name and "step_s" in row), None)
    if row is None:
        raise SystemExit(f"{file}: no row of {name} that ran")
    tokens = round(row["tokens_per_s"] * row["step_s"])
    if tokens != arguments.sequences * arguments.seq_len:
        raise SystemExit(f"{file}: {name} has {tokens} tokens a step")
    return {key: row[key] for key in ("step_s", "all_step_s", "tflops")}


def run_command(arguments: Any, folder: Path) -> dict[str, Any]:
    text = arguments.data or write_text(folder / "text.txt")
    write_tokenizer(folder / "tokenizer", text)
    model = str(arguments.checkpoint or arguments.shape)
    command = [
        *(sys.executable, "-m", "outcore", "train", "--model", model),
        *("--tokenizer", str(folder / "tokenizer"), "--data", str(text)),
        *("--output", str(folder / "out"), "--max-steps", str(arguments.steps)),
        *("--seq-len", str(arguments.seq_len), "--no-tensorboard", "--log-every", "1"),
        *("--keep", "0"),  # a checkpoint of a 7B model takes 91 GB, which not every disk has
        *("--tokens-per-step", str(arguments.sequences * arguments.seq_len), "--lr", "1e-6"),
    ]
    compiled = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = os.environ | {name: str(folder / where) for name, where in compiled.items()}
    start, in_homes_after_s, load_s, first_step_after_s = time.perf_counter(), *3 * [math.nan]
    # Of a run that is this short only the steps count: it is ended before it writes its state.
    has_taken_all = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            after_s = time.perf_counter() - start
            print(f"{after_s:6.1f} s  {line}", end="")
            if found := re.search(r"in its homes after ([0-9.]+) s", line):
                in_homes_after_s, load_s = after_s, float(found[1])
            if "step 1/" in line:
                first_step_after_s = after_s
            if f"step {arguments.steps}/" in line:
                has_taken_all = True
                process.kill()
    if not has_taken_all:
        raise SystemExit(f"outcore train ended early, with status {process.returncode}")
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").open()]
    counted = [line for line in lines if line["step"] >= FIRST_STEP]
    return {
        "seconds": time.perf_counter() - start,
        "step_s": statistics.mean(line["step_s"] for line in counted),
        "all_step_s": [line["step_s"] for line in counted],
        "tflops": statistics.mean(line["tflops"] for line in counted),
        "load_s": load_s,
        "in_homes_after_s": in_homes_after_s,
        "first_step_after_s": first_step_after_s,
        "data_wait_s": statistics.mean(line["data_wait_s"] for line in counted),
    }


def read_rates(folder: Path) -> dict[str, float]:
    """Return what the disk of a checkpoint gives; nothing of it is in the page cache then."""
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    alone_s = read_files(files, None)
    touch(new_memory(num_bytes))  # a virtual machine may have to get it first
    to_memory_s = read_files(files, new_memory(num_bytes))
    evict(files)
    return {
        "num_bytes": num_bytes,
        "alone_bytes_s": num_bytes / alone_s,
        "to_memory_bytes_s": num_bytes / to_memory_s,
    }


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write random weights of the shape, in a process whose memory is given back.

    What is there already stays. Nothing of it is in the page cache then.
    """
    lines = (
        "import sys, torch, outcore",
        "from outcore.shapes import shape_config",
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
        "config = shape_config(sys.argv[1])",
        "model = outcore.from_config(config, device=device, dtype=torch.bfloat16)",
        "model.save_pretrained(sys.argv[2])",
    )
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, "-c", "\n".join(lines), shape, str(folder)], check=True)
    os.sync()  # only what is on the disk can leave the page cache
    evict(sorted(folder.glob("*.safetensors")))


def write_text(path: Path) -> Path:
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = (source.read_text("utf-8", "ignore") for source in sorted(library.glob("*.py")))
    path.write_text("\n".join(sources), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, text: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train([str(text)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)


if __name__ == "__main__":
    main()
