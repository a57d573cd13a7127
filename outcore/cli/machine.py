"""What a report says about the machine: a figure without its hardware says nothing.

Reads files and asks nvidia-smi; it does not start CUDA, which would take device memory from what
is being measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "triton", "torchao", "roundpipe", "deepspeed")


def machine_facts() -> dict[str, Any]:
    """Return GPUs, CPU, usable cores, RAM and versions, as plain values."""
    import outcore

    return {
        "gpus": _gpus(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {
            "outcore": outcore.__version__,
            "python": platform.python_version(),
            **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
        },
    }


def machine_line(facts: dict[str, Any]) -> str:
    """Return the facts that matter most in one line."""
    from outcore.units import format_bytes

    gpus = [gpu["name"] for gpu in facts["gpus"]] or ["no GPU"]
    return " · ".join(
        [
            ", ".join(gpus),
            f"{facts['cpu']}, {facts['cores']} cores",
            f"{format_bytes(facts['ram_bytes'])} RAM",
            f"torch {facts['versions'].get('torch', 'missing')}",
            f"transformers {facts['versions'].get('transformers', 'missing')}",
        ]
    )


def _gpus() -> list[dict[str, str]]:
    query = ["name", "memory.total", "driver_version"]
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    keys = ("name", "memory", "driver")
    return [dict(zip(keys, row, strict=False)) for row in rows]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
