"""Learning rates: up, down, and where they end."""

from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from outcore.train.schedule import LearningRate, warmup_steps


@pytest.mark.parametrize(
    ("name", "make"),
    [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)],
)
def test_as_in_transformers(name: str, make: object) -> None:
    """Only the warm-up differs: theirs begins with a step that changes nothing."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = make(optimizer, num_warmup_steps=5, num_training_steps=40)  # type: ignore[operator]
    ours = LearningRate(peak=2.0, schedule=name, num_steps=40, num_warmup_steps=5)  # type: ignore[arg-type]
    for step in range(40):
        if step >= 5:
            assert ours.at(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
    assert [ours.at(step) for step in range(5)] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_constant_and_least() -> None:
    constant = LearningRate(peak=1.0, schedule="constant", num_steps=10, num_warmup_steps=0)
    assert {constant.at(step) for step in range(10)} == {1.0}
    cosine = LearningRate(peak=1.0, schedule="cosine", num_steps=10, num_warmup_steps=0, least=0.1)
    assert cosine.at(10) == pytest.approx(0.1)
    assert cosine.at(1000) == pytest.approx(0.1)


def test_warm_up_as_a_part_or_as_steps() -> None:
    assert warmup_steps(0.03, 1000) == 30
    assert warmup_steps(50, 1000) == 50
    assert warmup_steps(50, 20) == 20
    assert warmup_steps(0, 20) == 0
