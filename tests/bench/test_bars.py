"""bars.sh runs what it says that it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_scripts import BENCHMARKS

TESTS = BENCHMARKS.parent / "tests"
# They take a GPU alone, or train again what the placements and figures of bars.sh train.
LEFT_OUT = {"bench", "checkpoint", "cli", "hf", "machine", "verify"}


def test_every_room_with_tests_that_need_a_gpu_is_run_or_left_out_on_purpose() -> None:
    run = set(re.findall(r"tests/(\w+)", (BENCHMARKS / "bars.sh").read_text()))
    marked = {
        path.parent.name
        for path in TESTS.glob("*/test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    }
    assert run == marked - LEFT_OUT


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_figures_of_an_earlier_call_do_not_stand_for_what_fails(tmp_path: Path) -> None:
    """Everything but the check for kernels and the table at the end fails here."""
    bin, folder, disk = (tmp_path / name for name in ("bin", "folder", "disk"))
    bin.mkdir()
    python = bin / "python3"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n*has_library*) exit 0 ;;\n'
        f'*bars_table*) exec {sys.executable} "$@" ;;\n*) exit 1 ;;\nesac\n'
    )
    python.chmod(0o755)
    folder.mkdir()
    for name, result in {
        "probe-disk-train-loading-exact-tiers-lora.json": "plans-one-probe-probe",
        "plans-7b.json": "plans-one-probe",
        "loading-7b.json": "loading-7b",
        "verify-1b-kept.json": "verify-1b",
        "smollm2.json": "smollm2",
        "lora-72b.json": "lora-72b",
        "checkpoint.json": "checkpoint",
    }.items():
        shutil.copy(BENCHMARKS / "results" / f"2026-11-18-h200-{result}.json", folder / name)
    ran = subprocess.run(
        ["bash", str(BENCHMARKS / "bars.sh"), "disk,train,loading,exact,tiers,lora", folder, disk],
        env={**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert "held" not in ran.stdout
    num_failed = ran.stdout.count(" FAILED ") / 2  # each is told at once, and at the end
    assert num_failed == 11
    assert ran.returncode == num_failed + ran.stdout.count("MISSED")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_what_hangs_costs_its_own_figure_alone(tmp_path: Path) -> None:
    """The limits are those of a GPU; here they are a second."""
    bin, folder, disk = (tmp_path / name for name in ("bin", "folder", "disk"))
    bin.mkdir()
    python = bin / "python3"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n*has_library*) exit 0 ;;\n'
        f'*bars_table*) exec {sys.executable} "$@" ;;\n*loading.py*) exit 0 ;;\n'
        f"*) exec sleep 60 ;;\nesac\n"
    )
    timeout = bin / "timeout"
    timeout.write_text(f'#!/bin/sh\nshift 3\nexec {shutil.which("timeout")} 1 "$@"\n')
    for program in (python, timeout):
        program.chmod(0o755)
    ran = subprocess.run(
        ["bash", str(BENCHMARKS / "bars.sh"), "exact,loading", folder, disk],
        env={**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert [line.split()[:2] for line in ran.stdout.splitlines() if line.endswith(" s")][-3:] == [
        ["probe", "FAILED"],
        ["exactness", "FAILED"],
        ["loading", "done"],
    ]
