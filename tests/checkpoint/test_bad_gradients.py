"""NaN in a loss, a gradient or one block: the policy is followed, and nothing bad is ever saved."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import ALL_PLACEMENTS, Run, assert_same
from torch import Tensor

from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import NonFiniteGradient
from outcore.stream.lanes import injected_delays

STEPS = 8
WHERE = ("loss", "gradient", "block")


def poisoned(run: Run, where: str) -> Callable[[], None]:
    """Let the next backward meet a NaN; return what takes it away again."""
    if where == "gradient":
        embedding = run.model.transformer.wte
        return embedding.weight.register_hook(lambda gradient: gradient * float("nan")).remove
    block = run.model.transformer.h[1]

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        spoilt = output[0] if isinstance(output, tuple) else output
        spoilt = spoilt * float("nan")
        return (spoilt, *output[1:]) if isinstance(output, tuple) else spoilt

    handle = block.mlp.register_forward_hook(spoil)
    return handle.remove


def step(run: Run, bad: str | None) -> None:
    """Take a step whose loss, gradient or block is not a number."""
    if bad is None:
        run.step()
        return
    ids = torch.randint(0, 41, (2, 8))
    clean = poisoned(run, bad) if bad != "loss" else lambda: None
    try:
        loss = run.model(input_ids=ids, labels=ids).loss
        (loss * float("nan") if bad == "loss" else loss).backward()
        run.optimizer.step()
    finally:
        clean()
        run.optimizer.zero_grad()


def history(tmp_path: Path, bad: dict[int, str], placement: dict[str, Any]) -> list[Any]:
    """Return the tensors after each step of a run that skips the bad ones, without checkpoints."""
    run = Run(tmp_path, adamw={"on_non_finite": "skip"}, **placement)
    states = []
    for number in range(STEPS):
        step(run, bad.get(number))
        states.append(run.tensors())
    return states


@pytest.mark.parametrize("where", WHERE)
def test_a_skipped_step_changes_nothing_and_resumes_exactly(where: str, tmp_path: Path) -> None:
    draw = random.Random(WHERE.index(where))
    bad = dict.fromkeys(draw.sample(range(1, STEPS), 3), where)
    expected = history(tmp_path, bad, ALL_PLACEMENTS[0])
    for number in bad:  # the step itself changed nothing but the generators
        assert_same(expected[number], expected[number - 1])
    for placement in (ALL_PLACEMENTS[0], ALL_PLACEMENTS[4]):
        folder = CheckpointFolder(tmp_path / str(ALL_PLACEMENTS.index(placement)), keep=STEPS)
        run = Run(tmp_path, adamw={"on_non_finite": "skip"}, **placement)
        with injected_delays(0.001, seed=1):
            checkpoints = AsyncCheckpoints(folder, run.model, run.optimizer)
            for number in range(STEPS):
                step(run, bad.get(number))
                checkpoints.begin({**run.values(), "number": number})
            checkpoints.close()
        assert_same(run.tensors(), expected[-1])
        assert run.optimizer.num_skipped_steps == 3
        assert folder.steps() == list(range(1, STEPS - 3 + 1))
        last = max(bad)  # go on from the checkpoint of the last skipped step
        other = Run(tmp_path, seed=9, adamw={"on_non_finite": "skip"}, **placement)
        for number in range(STEPS - 1, last, -1):
            if number not in bad:
                newest = folder.directory(max(folder.steps()))
                newest.rename(tmp_path / f"aside-{number}-{folder.path.name}")
        other.load(folder)
        assert other.optimizer.num_skipped_steps == 3
        assert_same(other.tensors(), expected[last])
        for number in range(last + 1, STEPS):
            step(other, bad.get(number))
            assert_same(other.tensors(), expected[number])


@pytest.mark.parametrize("where", WHERE)
def test_a_raised_one_leaves_the_state_and_the_checkpoint_in_flight(
    where: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, **ALL_PLACEMENTS[0])
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with AsyncCheckpoints(folder, run.model, run.optimizer) as checkpoints:
        for _ in range(random.Random(where).randrange(1, 4)):
            run.step()
        before = run.tensors()
        checkpoints.begin(run.values())
        with pytest.raises(NonFiniteGradient):
            step(run, where)
        assert_same(run.tensors(), before)
        generators = torch.get_rng_state()
        steps = run.optimizer.num_steps
    other = Run(tmp_path, seed=9, **ALL_PLACEMENTS[3])
    assert other.load(folder) == steps
    assert_same(other.tensors(), before)
    torch.set_rng_state(generators)
    run.step()  # the run itself goes on too
    assert run.optimizer.num_steps == steps + 1
    assert all(bool(t.isfinite().all()) for t in run.tensors().values() if isinstance(t, Tensor))
