"""Callbacks that read the model see the weights of the step that has just been taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from trainer_runs import run

import outcore.hf.callbacks
from outcore.hf import Trainer
from outcore.stream.lanes import injected_delays


class Average(transformers.TrainerCallback):  # type: ignore[misc]
    """Sums up the weights of all steps, and is not told that it should wait for them."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            self.sums[name] = self.sums.get(name, 0.0) + parameter.detach().float()


class Counter(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


def test_a_callback_that_averages_weights(tmp_path: Path) -> None:
    found = []
    for kind in (transformers.Trainer, Trainer):
        average = Average()
        with injected_delays(0.02, seed=0):
            folder = tmp_path / kind.__module__.split(".")[0]
            run(kind, folder, more={"callbacks": [average]})
        found.append(average.sums)
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=0, atol=2e-3)


def test_a_callback_that_does_not_read_the_model_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(outcore.hf.callbacks, "synchronize", waits.append)
    counter = Counter()
    run(Trainer, tmp_path / "a", more={"callbacks": [counter]}, report_to=["tensorboard"])
    assert counter.steps == 6
    assert not waits
    run(Trainer, tmp_path / "b", more={"callbacks": [counter, Average()]})
    assert len(waits) == 6
