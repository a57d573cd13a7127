"""Measures every training figure that the README claims, in one run on one machine.

    python benchmarks/readme_table.py --json FILE [--only 7b,3b,3b-clipping]

7b: the Qwen2.5-7B shape under each budget. 3b and 3b-clipping: the Qwen2.5-3B shape beside the
peers that update without and with clipping. Each row runs in a process of its own and is written
as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outcore.bench.job import BenchFailure, BenchJob, BenchRow
from outcore.bench.peers.runner import run_peer
from outcore.cli.machine import machine_facts
from outcore.shapes import shape_dict

SEQ_LEN = 2048
BUDGET = {"device_memory": "24GiB"}
# name, system, shape, sequences, clipping, options of offload
Setting = tuple[str, str, str, int, float | None, dict[str, Any]]
SETTINGS: dict[str, list[Setting]] = {
    "7b": [
        ("24 GiB, no clipping, 16 sequences", "outcore", "qwen2.5-7b", 16, None, BUDGET),
        ("24 GiB, clipping, 16 sequences", "outcore", "qwen2.5-7b", 16, 1.0, BUDGET),
        ("24 GiB, clipping, 32 sequences", "outcore", "qwen2.5-7b", 32, 1.0, BUDGET),
        ("whole GPU, no clipping, 16 sequences", "outcore", "qwen2.5-7b", 16, None, {}),
    ],
    "3b": [
        ("outcore, no clipping", "outcore", "qwen2.5-3b", 16, None, {}),
        ("native, no clipping", "native", "qwen2.5-3b", 16, None, {}),
        ("torchao, no clipping", "torchao", "qwen2.5-3b", 16, None, {}),
        ("roundpipe, no clipping", "roundpipe", "qwen2.5-3b", 16, None, {}),
    ],
    "3b-clipping": [
        ("outcore, clipping", "outcore", "qwen2.5-3b", 16, 1.0, {}),
        ("deepspeed, clipping", "deepspeed", "qwen2.5-3b", 16, 1.0, {}),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument(
        "--only", default=",".join(SETTINGS), help="groups of settings, with commas"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each row")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for group in arguments.only.split(","):
        for name, system, shape, sequences, clip, options in SETTINGS[group]:
            job = BenchJob(
                config=shape_dict(shape, tie_word_embeddings=False),
                sequences=sequences,
                seq_len=SEQ_LEN,
                max_grad_norm=clip,
                outcore_options=options,
            )
            row = run_peer(system, job, limit_s=arguments.limit)
            rows.append({"setting": name, "shape": shape, **json.loads(row.to_json())})
            arguments.json.write_text(
                json.dumps({"machine": machine_facts(), "rows": rows}, indent=1)
            )
            print(f"{shape:11s} {name:38s} {_summary(row)}", flush=True)


def _summary(row: BenchRow) -> str:
    if isinstance(row, BenchFailure):
        return f"failed: {row.failed}"
    return (
        f"{row.tflops:6.1f} TFLOPS  {row.tokens_per_s:8.0f} tok/s  {row.step_s:6.3f} s  "
        f"device {row.device_peak_bytes / 2**30:6.1f} GiB  host {row.host_rss_bytes / 1e9:6.1f} GB"
    )


if __name__ == "__main__":
    main()
