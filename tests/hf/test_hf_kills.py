"""Killed at any moment, also during a checkpoint, a run of Trainer ends with the same bits."""

from __future__ import annotations

import multiprocessing
import random
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import assert_same_bits, gpt2, run, state

import outcore
from outcore.hf import Trainer

OPTIONS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 12,
    "save_total_limit": 3,
}


def train(folder: Path) -> Any:
    """Begin, or go on where the last checkpoint is; one that is unfinished may be in the way."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run(Trainer, folder, model=gpt2(), resume=True, **OPTIONS)
        except ValueError as error:
            if "No valid checkpoint" not in str(error):
                raise
            return run(Trainer, folder, model=gpt2(), **OPTIONS)


def started(folder: Path) -> multiprocessing.process.BaseProcess:
    """Return a run in a process of its own, forked: a new interpreter takes longer than the run."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(folder,))
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    whole = run(Trainer, tmp_path / "whole", model=gpt2(), **OPTIONS)
    expected = state(whole)
    outcore.release(whole.model)
    draw = random.Random(seed)
    start = time.perf_counter()
    started(tmp_path / "timed").join()
    whole_s = time.perf_counter() - start
    num_killed = 0
    for _ in range(8):
        process = started(tmp_path / "killed")
        process.join(draw.uniform(0.05, 0.4) * whole_s)
        if process.is_alive():
            process.kill()
            num_killed += 1
        process.join()
    assert num_killed >= 2, "too quick to be killed"
    assert_same_bits(state(train(tmp_path / "killed")), expected)
