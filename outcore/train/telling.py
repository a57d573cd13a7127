"""Each step, told to the display and to the metrics when its loss is known: one step later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from outcore.train.display import Display
from outcore.train.figures import StepFigures
from outcore.train.lagged_values import LaggedValues
from outcore.train.metrics import Metrics


class StepTeller:
    """Takes the time of steps, and tells of each."""

    def __init__(self, display: Display, metrics: Metrics, more: Sequence[str] = ()) -> None:
        """``more``: names of what is told beside the loss."""
        self.loss: float | None = None  # of the last step that was told
        self._display = display
        self._metrics = metrics
        self._more = more
        self._pending: StepFigures | None = None
        self._before_s = time.perf_counter()

    def step(
        self, values_before: list[float] | None, figures: Callable[[float], StepFigures]
    ) -> None:
        """A step was taken; ``values_before`` are those of the step before it, its loss first.

        figures: returns those of this step, for the seconds that it took; their loss comes later.
        """
        self._tell(values_before)
        now_s = time.perf_counter()
        self._pending = figures(now_s - self._before_s)
        self._before_s = now_s

    def flush(self, values: LaggedValues) -> None:
        """Tell of the last step too, and leave what follows out of the next step's time."""
        self._tell(values.last())
        self._before_s = time.perf_counter()

    def _tell(self, values: list[float] | None) -> None:
        if self._pending is None or values is None:
            return
        loss, *others = values
        more = dict(zip(self._more, others, strict=True))
        figures = replace(self._pending, loss=loss, more=more)
        self._pending = None
        self.loss = loss
        # First on the disk: who reads of a step in the log finds it there.
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
            **more,
        )
        self._display.step(figures)
