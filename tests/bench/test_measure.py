"""Which figure stands at the head of a row."""

import pytest

from outcore.bench.job import BenchJob
from outcore.bench.peers.measure import StepTimes, time_steps


def test_a_system_that_finishes_its_steps_is_counted_by_the_median() -> None:
    times = StepTimes(first_s=9.0, steps_s=[1.0, 1.1, 5.0])
    assert times.headline_s == 1.1


def test_a_system_that_works_on_is_counted_by_the_mean() -> None:
    # Three steps that return at once, and two that wait for what the others began.
    times = StepTimes(first_s=9.0, steps_s=[0.1, 0.1, 2.4, 0.1, 2.3], drain_s=1.0)
    assert times.headline_s == pytest.approx(1.0)
    assert times.mean_drained_s == pytest.approx(1.2)


def test_warm_up_steps_run_and_are_not_counted() -> None:
    calls: list[str] = []
    job = BenchJob(config={"model_type": "llama"}, sequences=1, seq_len=8, warmup_steps=2, steps=3)
    times = time_steps(
        job,
        lambda: calls.append("step"),
        after_step=lambda: calls.append("wait"),
        drain=lambda: calls.append("drain"),
    )
    assert calls == ["step", "wait"] * 5 + ["drain"]
    assert len(times.steps_s) == 3
