"""`outcore train --deterministic` on a GPU: the same bits in every process, and after a stop."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from train_processes import started, wait_for

from outcore.train.demo import make_demo

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def test_a_stopped_run_goes_on_to_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    job = make_demo(tmp_path / "demo", device=DEVICE)

    def start(name: str, *more: str) -> subprocess.Popen[str]:
        arguments = [
            *("--model", job.settings.model, "--data", job.settings.data[0]),
            *("--output", str(tmp_path / name), "--seq-len", "64", "--tokens-per-step", "1024"),
            *("--micro-batch", "4", "--max-steps", "60", "--lr", "1e-3", "--num-workers", "1"),
            *("--log-every", "1", "--no-tensorboard", "--deterministic", *more),
        ]
        # Nothing compiled is shared: each process chooses its kernels itself.
        return started(DEVICE, arguments, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / f"{name}-kernels"))

    streamed = ("--device-memory", "1GiB")  # less than the model and its state
    with (
        start("whole") as whole,
        start("again", *streamed) as again,
        start("stopped", *streamed) as stopped,
    ):
        wait_for(stopped, "step 20/")
        stopped.send_signal(signal.SIGTERM)
        for process in (whole, again, stopped):
            told, _ = process.communicate(timeout=400)
            assert process.returncode == 0, told
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    with start("stopped", "--resume") as resumed:
        told, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, told
    bits = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == bits
    assert (tmp_path / "stopped" / "model.safetensors").read_bytes() == bits
