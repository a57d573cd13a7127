"""What `make demo` runs: it learns, in less device memory than the model takes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "learn_arithmetic.py"


def run_demo(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    figures = folder / "figures.json"
    command = [sys.executable, str(SCRIPT), "--json", str(figures), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=280
    )
    assert figures.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(figures.read_text())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learn_arithmetic", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_short_run_learns_something_but_not_enough(tmp_path: Path) -> None:
    status, output, figures = run_demo(tmp_path, "--steps", "15")
    assert status == 1, "so few steps cannot be enough"
    assert "Where everything lived" in output
    assert "weight slots" in output
    assert "90% were expected" in output
    assert len(figures["losses"]) == 15
    assert sum(figures["losses"][-3:]) < 0.9 * sum(figures["losses"][:3])
    device = figures["tiers"][0]
    assert device["peak_bytes"] <= device["budget_bytes"] < figures["training_bytes"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_whole_run_learns_to_add(tmp_path: Path, seed: str) -> None:
    status, output, figures = run_demo(tmp_path, "--seed", seed)
    assert status == 0, output
    assert figures["accuracy_before"] < 0.05
    assert figures["accuracy_after"] >= 0.97


def test_a_budget_that_is_too_small_says_what_it_takes() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device-memory", "1MiB"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 2
    assert "budget of 1.0 MiB" in done.stdout
    assert "Traceback" not in done.stderr


def test_no_held_out_problem_is_trained_on(demo: ModuleType) -> None:
    training, held_out = demo.split_problems(seed=3)
    assert len(training) + len(held_out) == 10_000
    assert len(torch.unique(torch.cat([training, held_out]), dim=0)) == 10_000


def test_problems_are_sums_with_their_units_first(demo: ModuleType) -> None:
    tokens = demo.encode(torch.tensor([23, 99]), torch.tensor([58, 1])).tolist()
    texts = ["".join(demo.SYMBOLS[token] for token in row) for row in tokens]
    assert texts == ["32+85=180", "99+10=001"]
    assert demo.written(tokens[0][demo.PROMPT_LENGTH :]) == "81"
