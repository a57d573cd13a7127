"""`outcore train` beside the bare engine: the same shape, plan, tokens and clipping.

The engine takes one batch of random tokens again and again (`outcore bench train` does the same);
`outcore train` reads, packs and shuffles real files, shows and writes figures, and steps. Each runs
in a process of its own. Steps are counted from the fifth on.

    python benchmarks/train_command.py --json FILE [--shape qwen2.5-7b] [--data FILE]

Without --data the sources of Python's standard library are the text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

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
    arguments = parser.parse_args()
    engine = run_engine(arguments)
    with tempfile.TemporaryDirectory() as folder:
        command = run_command(arguments, Path(folder))
    report = {"machine": machine_facts(), "engine": engine, "train": command}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    ratio = command["step_s"] / engine["step_s"]
    print(f"engine {engine['step_s']:.3f} s a step, outcore train {command['step_s']:.3f} s")
    print(f"outcore train takes {ratio - 1:+.1%}; waits for data {command['data_wait_s']:.4f} s")


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


def run_command(arguments: Any, folder: Path) -> dict[str, Any]:
    text = arguments.data or write_text(folder / "text.txt")
    write_tokenizer(folder / "tokenizer", text)
    command = [
        *(sys.executable, "-m", "outcore", "train", "--model", arguments.shape),
        *("--tokenizer", str(folder / "tokenizer"), "--data", str(text)),
        *("--output", str(folder / "out"), "--max-steps", str(arguments.steps)),
        *("--seq-len", str(arguments.seq_len), "--no-tensorboard", "--log-every", "1"),
        *("--tokens-per-step", str(arguments.sequences * arguments.seq_len), "--lr", "1e-6"),
    ]
    start = time.perf_counter()
    # Of a run that is this short only the steps count: it is ended before it writes its state.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            if f"step {arguments.steps}/" in line:
                process.kill()
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").open()]
    counted = [line for line in lines if line["step"] >= FIRST_STEP]
    return {
        "seconds": time.perf_counter() - start,
        "step_s": statistics.mean(line["step_s"] for line in counted),
        "all_step_s": [line["step_s"] for line in counted],
        "tflops": statistics.mean(line["tflops"] for line in counted),
        "data_wait_s": statistics.mean(line["data_wait_s"] for line in counted),
    }


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
