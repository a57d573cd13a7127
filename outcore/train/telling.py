"""Each step, told to the display and to the metrics when its loss is known: one step later."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from outcore.train.display import Display
from outcore.train.figures import StepFigures
from outcore.train.lagged_loss import LaggedLoss
from outcore.train.metrics import Metrics


class StepTeller:
    """Takes the time of steps, and tells of each."""

    def __init__(self, display: Display, metrics: Metrics) -> None:
        self.loss: float | None = None  # of the last step that was told
        self._display = display
        self._metrics = metrics
        self._pending: StepFigures | None = None
        self._before_s = time.perf_counter()

    def step(self, loss_before: float | None, figures: Callable[[float], StepFigures]) -> None:
        """A step was taken; ``loss_before`` is that of the step before it.

        figures: returns those of this step, for the seconds that it took; their loss comes later.
        """
        self._tell(loss_before)
        now_s = time.perf_counter()
        self._pending = figures(now_s - self._before_s)
        self._before_s = now_s

    def flush(self, losses: LaggedLoss) -> None:
        """Tell of the last step too, and leave what follows out of the next step's time."""
        self._tell(losses.last())
        self._before_s = time.perf_counter()

    def _tell(self, loss: float | None) -> None:
        if self._pending is None or loss is None:
            return
        figures = replace(self._pending, loss=loss)
        self._pending = None
        self.loss = loss
        self._display.step(figures)
        self._metrics.add(
            "train",
            figures.step,
            loss=loss,
            grad_norm=figures.grad_norm if figures.grad_norm is not None else float("nan"),
            lr=figures.lr,
            step_s=figures.step_s,
            tokens_per_s=figures.tokens_per_s,
            tflops=figures.tflops,
            data_wait_s=figures.data_wait_s,
        )
