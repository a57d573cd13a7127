"""Runs plans on this machine and compares each with its prediction: time, and bytes of each tier.

    python benchmarks/plans.py --json FILE [--only 7b,14b,...] [--disk DIR]

Every row makes a plan for this machine, carries it out in a process of its own, and is written as
soon as it is there. Rows that need a disk are left out without --disk. A disk that others share is
not equally fast a few minutes later: it is probed again just before each of them, for the plan, and
just after, for the reader.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from outcore.bench.job import BenchFailure, BenchJob, BenchRow
from outcore.bench.peers.runner import run_peer
from outcore.cli.machine import machine_facts
from outcore.kernels import has_library
from outcore.machine.probe import probe
from outcore.machine.probe.disk import measure_disk
from outcore.machine.probe.report import DiskFigures
from outcore.machine.probe.sizes import FULL
from outcore.shapes import shape_dict
from outcore.store.scratch_directory import remove_leftovers


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One plan to make and run."""

    shape: str
    sequences: int = 16
    seq_len: int = 2048
    clips: bool = True
    steps: int = 5
    warmup_steps: int = 3
    system: str = "outcore"
    micro_batch: int | None = None
    disk_bytes: int | None = None  # needs a disk, with this budget
    plan: dict[str, Any] = field(default_factory=dict)


GIB = 2**30
SHORT = replace(FULL, disk_s=FULL.disk_s / 2)
LONG = Setting(
    shape="llama-3.1-8b",
    sequences=1,
    seq_len=65_536,
    clips=False,
    steps=2,
    warmup_steps=1,
    plan={"device_memory": "24GiB"},
)
ON_DISK = Setting(
    shape="qwen2.5-3b",
    clips=False,
    disk_bytes=50 * GIB,
    plan={"host_memory": "12GiB", "device_memory": "16GiB"},
)
SETTINGS = {
    "7b": Setting(shape="qwen2.5-7b"),
    "7b-native": Setting(shape="qwen2.5-7b", system="native", micro_batch=1),
    "7b-24g": Setting(shape="qwen2.5-7b", plan={"device_memory": "24GiB"}),
    "7b-24g-no-clip": Setting(shape="qwen2.5-7b", clips=False, plan={"device_memory": "24GiB"}),
    "3b": Setting(shape="qwen2.5-3b"),
    "3b-16g": Setting(shape="qwen2.5-3b", plan={"device_memory": "16GiB"}),
    "0.5b-small": Setting(  # bound by launches, see the limits in docs/planning.md
        shape="qwen2.5-0.5b", seq_len=256, steps=20
    ),
    "14b": Setting(shape="qwen2.5-14b"),
    "32b-compact": Setting(shape="qwen2.5-32b", plan={"state_format": "compact"}),
    "72b-minimal": Setting(
        shape="qwen2.5-72b",
        sequences=7,
        clips=False,
        steps=2,
        warmup_steps=1,
        disk_bytes=61 * GIB,
        plan={"state_format": "minimal"},
    ),
    "72b-minimal-clip": Setting(
        shape="qwen2.5-72b",
        sequences=7,
        steps=2,
        warmup_steps=1,
        disk_bytes=61 * GIB,
        plan={"state_format": "minimal", "clipping": "two-pass"},
    ),
    "8b-long": LONG,
    "8b-longest": replace(LONG, seq_len=106_496),
    "8b-long-clip": replace(LONG, seq_len=73_728, clips=True),
    "8b-longest-clip": replace(
        LONG,
        seq_len=106_496,
        clips=True,
        plan={"device_memory": "24GiB", "clipping": "two-pass"},
    ),
    "3b-disk": ON_DISK,
    "3b-disk-wait": replace(ON_DISK, clips=True, plan={**ON_DISK.plan, "host_memory": "16GiB"}),
    "3b-disk-clip": replace(ON_DISK, clips=True, plan={**ON_DISK.plan, "clipping": "two-pass"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, with commas")
    parser.add_argument("--disk", help="a directory for scratch files")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for each row")
    arguments = parser.parse_args()
    if not has_library():
        raise SystemExit("the host's kernels are not built: steps would be several times slower")
    rows: list[dict[str, Any]] = []
    for name in arguments.only.split(","):
        setting = SETTINGS[name]
        if setting.disk_bytes is not None and arguments.disk is None:
            print(f"{name:16s} left out: needs --disk")
            continue
        before = disk_now(arguments.disk) if setting.disk_bytes is not None else None
        row = run_peer(setting.system, job_of(setting, arguments.disk), limit_s=arguments.limit)
        rows.append({"setting": name, **json.loads(row.to_json())})
        write(arguments.json, rows)
        print(f"{name:16s} {summary(row)}", flush=True)
        if before is None:
            continue
        remove_leftovers(Path(arguments.disk))  # of a process that was killed: all of the disk
        after = measure_disk(Path(arguments.disk), SHORT, pin=True)
        rows[-1]["disk"] = {"before": asdict(before), "after": asdict(after)}
        write(arguments.json, rows)
        seen = ", ".join(f"{x.both_ways_bytes_s / 1e9:.2f}" for x in (before, after))
        print(f"{name:16s} disk, GB/s each way, before and after: {seen}", flush=True)
    if failed := [row["setting"] for row in rows if "failed" in row]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1))


def disk_now(folder: str) -> DiskFigures:
    """Probe the disk again, so that the next plan goes by it."""
    remove_leftovers(Path(folder))
    report = probe(disk=folder, refresh_disk=True)
    assert report.disk is not None
    return report.disk


def job_of(setting: Setting, disk: str | None) -> BenchJob:
    plan = dict(setting.plan)
    if setting.disk_bytes is not None:
        plan["disk"] = f"{disk}:{setting.disk_bytes}"
    return BenchJob(
        config=shape_dict(setting.shape, tie_word_embeddings=False),
        sequences=setting.sequences,
        seq_len=setting.seq_len,
        steps=setting.steps,
        warmup_steps=setting.warmup_steps,
        max_grad_norm=1.0 if setting.clips else None,
        micro_batch=setting.micro_batch,
        plan_options=plan,
        records=setting.disk_bytes is not None,  # how the disk's lanes were used is worth 1%
    )


def summary(row: BenchRow) -> str:
    if isinstance(row, BenchFailure):
        return f"failed: {row.failed}"
    cells = [f"{row.tflops:6.1f} TFLOPS  {row.tokens_per_s:8.0f} tok/s"]
    for what, found in row.notes.get("prediction", {}).items():
        if found["measured"]:
            share = found["predicted"] / found["measured"] - 1
            cells.append(f"{what} {found['measured']:.4g} ({share:+.1%} predicted)")
    return "  ".join(cells)


if __name__ == "__main__":
    main()
