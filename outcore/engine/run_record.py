"""A run as it was: what each lane did in a step, and the peak of each tier.

with outcore.record(model) as run:
    ...  # three steps or more: the last whole one is shown
outcore.report(model, run)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from outcore.engine.offload import engine_of
from outcore.engine.offloaded import Engine
from outcore.planning.plan import WORKING_MEMORY
from outcore.stream.recording import Recording, recording
from outcore.timeline import Span
from outcore.views.page import plan_page
from outcore.views.side_by_side import Measurement, Row, side_by_side, side_by_side_table
from outcore.views.trace import write_trace


class RunRecord:
    """What ``record`` has seen of one model's training."""

    def __init__(self, engine: Engine, recording: Recording) -> None:
        self._engine = engine
        self._recording = recording

    def spans(self) -> list[Span]:
        """Return everything that was recorded; waits for the device."""
        return self._recording.spans()

    @property
    def num_steps(self) -> int:
        """How many optimizer steps were recorded; those that were skipped leave none."""
        return len(self._recording.steps_s)

    def measurement(self) -> Measurement:
        """Return the last whole step, and the peak bytes so far."""
        steps = self._recording.steps_s
        if len(steps) < 2:
            raise ValueError(
                f"{len(steps)} optimizer steps were recorded: two or more are needed, because one "
                "is measured from the end of the step before"
            )
        start_s, end_s = steps[-2], steps[-1]
        spans = [
            Span(
                lane=span.lane,
                name=span.name,
                start_s=max(span.start_s, start_s) - start_s,
                end_s=min(span.end_s, end_s) - start_s,
            )
            for span in self.spans()
            if span.start_s < end_s and span.end_s > start_s
        ]
        return Measurement(
            step_s=end_s - start_s,
            spans=tuple(spans),
            peak_bytes={tier.tier: tier.peak_bytes for tier in self._engine.report()},
            # A CPU's allocator tells nothing: only the books are known.
            unseen=() if self._engine.device.type == "cuda" else (WORKING_MEMORY,),
        )

    def write_trace(self, path: str | Path) -> None:
        """Write all spans, beside the plan's if there is one, for ui.perfetto.dev."""
        plan = self._engine.plan
        predicted = () if plan is None else plan.prediction.timeline
        write_trace(self.spans(), path, predicted=predicted)


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[RunRecord]:
    """Record what every lane does while the context is open; it slows a step by about a percent."""
    engine = engine_of(model)
    with recording(engine.device) as found:
        yield RunRecord(engine, found)


def report(model: nn.Module, run: RunRecord, *, html: str | Path | None = None) -> list[Row]:
    """Print the plan's prediction and what ``run`` measured side by side; return the rows.

    ``html``: a file for the same as a page, with both timelines.
    """
    from rich.console import Console

    plan = engine_of(model).plan
    if plan is None:
        raise ValueError(
            "the model was offloaded without a plan: use offload(model, plan=outcore.plan(...))"
        )
    measured = run.measurement()
    rows = side_by_side(plan, measured)
    Console().print(side_by_side_table(rows))
    if html is not None:
        Path(html).write_text(plan_page(plan, measured=measured), encoding="utf-8")
    return rows
