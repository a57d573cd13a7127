"""What is told of a step, and when."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from train_files import step_figures

from outcore.train.display import Display
from outcore.train.figures import StepFigures
from outcore.train.metrics import Metrics, read_metrics
from outcore.train.telling import StepTeller


class Reading(Display):
    """Looks into metrics.jsonl for each step that it is told of."""

    def __init__(self, output: Path) -> None:
        super().__init__(Console(quiet=True))
        self._output = output
        self.found: list[tuple[int, float]] = []

    def step(self, figures: StepFigures) -> None:
        line = read_metrics(self._output)[-1]
        assert line["step"] == figures.step
        self.found.append((figures.step, line["loss"]))


def test_a_step_that_is_shown_is_in_the_metrics(tmp_path: Path) -> None:
    """Who kills a run at a line of its log finds that step, with the loss that came a step late."""
    metrics, display = Metrics(tmp_path, first_step=1, tensorboard=False), Reading(tmp_path)
    teller = StepTeller(display, metrics)
    for step, loss_before in ((1, None), (2, [4.0]), (3, [2.0])):
        teller.step(loss_before, lambda step_s, step=step: step_figures(step, step_s))
    assert display.found == [(1, 4.0), (2, 2.0)]
    metrics.close()
