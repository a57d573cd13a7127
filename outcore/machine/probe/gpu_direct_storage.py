"""Whether the disk reads straight into device memory (GPUDirect Storage, cuFile): tried for real.

In a process of its own: a driver that does not fit can crash, and cuFile's settings are read once.
Its fallback, which copies through host memory and looks like success, is switched off there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

WORKS = "works"
_LIMIT_S = 20
_ALLOCATOR_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
_ENGINES_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

# What the other process runs: bytes written from the device, read back into it, and compared.
_TRIAL = """
import os, sys
import torch
from torch.cuda.gds import GdsFile
path = sys.argv[1]
there = torch.arange(1 << 20, dtype=torch.int32, device="cuda")
back = torch.zeros_like(there)
file = GdsFile(path, os.O_CREAT | os.O_RDWR)
os.unlink(path)
file.save_storage(there.untyped_storage(), offset=0)
file.load_storage(back.untyped_storage(), offset=0)
torch.cuda.synchronize()
sys.exit(0 if torch.equal(there, back) else "the bytes that came back are others")
"""


def try_gpu_direct_storage(device: torch.device, folder: Path) -> str:
    """Return "works", or the reason why not; never raises."""
    if device.type != "cuda":
        return "no GPU"
    if not hasattr(torch._C, "_gds_register_handle"):
        return "this torch has no cuFile binding"
    try:
        with tempfile.TemporaryDirectory(prefix=".outcore-probe-", dir=folder) as scratch:
            return _try(Path(scratch))
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def _try(scratch: Path) -> str:
    settings = scratch / "cufile.json"
    settings.write_text(json.dumps({"properties": {"allow_compat_mode": False}}))
    # As the engine sets it, unless the user has: what reads into ordinary device memory may not
    # read into segments that grow.
    allocator = {} if _ALLOCATOR_SETTINGS & os.environ.keys() else _ENGINES_ALLOCATOR
    environment = {**os.environ, **allocator, "CUFILE_ENV_PATH_JSON": str(settings)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, str(scratch / "trial")],
            cwd=scratch,  # cuFile writes its log where it runs
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_LIMIT_S} s"
    if done.returncode == 0:
        return WORKS
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the trial ended with status {done.returncode}"
