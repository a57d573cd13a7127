"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere.

A run tells a Display what happens; nothing comes back. The base class prints lines, one every few
steps, and is what logs and pipes get.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outcore.data.tokenize import Progress as TokenProgress
from outcore.planning.plan import LANES, Plan
from outcore.train.corpus import Corpus
from outcore.train.evaluation import Evaluated
from outcore.train.figures import StepFigures
from outcore.units import format_bytes, format_rate
from outcore.views.explain import homes_table, memory_table
from outcore.views.side_by_side import Measurement

_SHORT_NAMES = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
_QUIET_S = 2.0  # between lines about tokenising
_EVALUATING_QUIET_S = 15.0  # between lines about an evaluation, which may take hours
_BAR_WIDTH = 24


class Display:
    """Plain lines."""

    def __init__(self, console: Console, *, log_every: int = 10) -> None:
        self.console = console
        self._log_every = log_every
        self._last_line_s = 0.0
        self._recent_s: deque[float] = deque(maxlen=10)  # of the last steps
        self._is_stepping = False
        self._when_stopped = "ending once all is saved"

    def message(self, what: str) -> None:
        # Where nobody watches, what is one line stays one: for grep, and for logs.
        self.console.print(escape(what), soft_wrap=not self.console.is_terminal)

    def tokenising(self, progress: TokenProgress) -> None:
        now_s = time.perf_counter()
        if now_s - self._last_line_s > _QUIET_S:
            self._last_line_s = now_s
            share = progress.num_bytes / max(1, progress.total_bytes)
            self.message(f"tokenising: {progress.num_rows:,} rows, {share:.0%}")

    def data(self, corpus: Corpus) -> None:
        options, cache = corpus.training.options, corpus.cache
        sequences = options.batch_size * cache.documents_per_example
        self.message(
            f"data: {cache.num_examples:,} examples of {cache.row_format}, {cache.num_tokens:,} "
            f"tokens; {corpus.num_steps:,} steps of {sequences:,} × {options.seq_len:,} "
            f"tokens ({corpus.training.fill:.0%} filled)"
        )
        pieces = corpus.training.pieces
        if pieces.num_cut or pieces.num_dropped:
            self.message(
                f"{pieces.num_cut:,} examples are cut after {options.seq_len:,} tokens; "
                f"{pieces.num_dropped:,} are left out, with nothing to learn before that"
            )
        if cache.report.num_empty_rows:
            self.message(f"empty and left out: {cache.report.num_empty_rows:,} rows")
        if cache.report.num_rows_without_tools:
            self.message(
                "the chat template leaves the tools of rows out: those of "
                f"{cache.report.num_rows_without_tools:,} rows"
            )
        if cache.report.num_bad_rows:
            path, line, why = cache.report.first_bad_rows[0]
            self.message(
                f"malformed and left out: {cache.report.num_bad_rows:,} rows; the first is "
                f"{path}, line {line}: {why}"
            )

    def probing(self, what: str, number: int, total: int) -> None:
        self.message(f"measuring this machine, once: {what} ({number} of {total})")

    def plan(self, plan: Plan, fill: float) -> None:
        """Show a plan; ``fill`` of its tokens are no padding."""
        prediction = plan.prediction
        self.console.print(homes_table(plan))
        self.console.print(memory_table(plan))
        self.message(
            f"predicted: {prediction.step_s:.3g} s a step, "
            f"{format_rate(fill * prediction.tokens_per_s)} tokens/s; "
            f"{prediction.binding_lane} binds"
        )

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """While ``reference`` may be told of batches before the first step."""
        with self._stopped_by("finishing this batch, then saving"):
            yield

    def reference(self, number: int, total: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._last_line_s > _QUIET_S:
            self._last_line_s = now_s
            self.message(f"what the model says before training: batch {number:,} of {total:,}")

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.message(f"model in its homes after {time.perf_counter() - start_s:.1f} s")

    @contextlib.contextmanager
    def steps(self, done: int, total: int) -> Iterator[None]:
        self._is_stepping = True
        try:
            with self._stopped_by("finishing this step, then saving"):
                yield
        finally:
            self._is_stepping = False

    def step(self, figures: StepFigures) -> None:
        self._recent_s.append(figures.step_s)
        if figures.step % self._log_every == 0 or figures.step in (1, figures.num_steps):
            self.message(f"{step_line(figures)}  {_clock(self._left_s(figures))} left")

    def _left_s(self, figures: StepFigures) -> float:
        return (figures.num_steps - figures.step) * statistics.median(self._recent_s)

    def lanes(self, measurement: Measurement) -> None:
        self.message("measured use of lanes: " + lanes_line(measurement))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self._last_line_s = time.perf_counter()
        then = ", then saving" if self._is_stepping else "; the model is saved"
        with self._stopped_by(f"breaking off the evaluation{then}"):
            yield

    def evaluation_batch(self, number: int, total: int) -> None:
        """A batch is begun, the ``number``-th of the evaluation."""
        now_s = time.perf_counter()
        if now_s - self._last_line_s > _EVALUATING_QUIET_S:
            self._last_line_s = now_s
            self.message(_evaluation_line(number, total))

    def evaluated(self, step: int, found: Evaluated) -> None:
        perplexity = "" if found.perplexity is None else f", perplexity {found.perplexity:.2f}"
        more = "".join(f", {name} {value:.3g}" for name, value in _shown_figures(found.more))
        self.message(
            f"step {step}: held-out loss {found.loss:.4f}{perplexity}{more} "
            f"(over {found.count:,} {found.counts})"
        )

    def not_evaluated(self, step: int, *, is_resumable: bool) -> None:
        made_up = "; --resume makes up for it" if is_resumable else ""
        self.message(f"no held-out loss of step {step}: its evaluation was broken off{made_up}")

    @contextlib.contextmanager
    def saving(self, path: Path) -> Iterator[None]:
        start_s = time.perf_counter()
        with self._stopped_by("finishing what is being saved"):
            yield
        self.message(f"saved {path} in {time.perf_counter() - start_s:.1f} s")

    def stopping(self, signal: str) -> None:
        self.message(f"{signal}: {self._when_stopped}; another one ends it at once")

    @contextlib.contextmanager
    def _stopped_by(self, what: str) -> Iterator[None]:
        """A stop does ``what``, while this is open."""
        before, self._when_stopped = self._when_stopped, what
        try:
            yield
        finally:
            self._when_stopped = before


class LiveDisplay(Display):
    """A bar with figures, and under it the tiers and lanes."""

    def __init__(self, console: Console, *, log_every: int = 10) -> None:
        super().__init__(console, log_every=log_every)
        self._num_done, self._num_steps = 0, 0
        self._start_s = 0.0  # of the steps
        self._figures: StepFigures | None = None
        self._plan: Plan | None = None
        self._lanes: Measurement | None = None
        self._doing = ""
        self._doing_since_s = 0.0

    def plan(self, plan: Plan, fill: float) -> None:
        super().plan(plan, fill)
        self._plan = plan

    @contextlib.contextmanager
    def steps(self, done: int, total: int) -> Iterator[None]:
        self._num_done, self._num_steps = done, total
        self._start_s = time.perf_counter()
        live = Live(get_renderable=self._shown, console=self.console, refresh_per_second=4)
        with super().steps(done, total), live:
            yield

    def step(self, figures: StepFigures) -> None:
        self._recent_s.append(figures.step_s)
        self._figures, self._num_done = figures, figures.step

    def lanes(self, measurement: Measurement) -> None:
        self._lanes = measurement

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        with super().loading(), self._busy("loading the model"):
            yield

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with super().evaluating(), self._busy("evaluating"):
            yield

    def evaluation_batch(self, number: int, total: int) -> None:
        self._doing = _evaluation_line(number, total)

    @contextlib.contextmanager
    def saving(self, path: Path) -> Iterator[None]:
        with super().saving(path), self._busy(f"saving {path}"):
            yield

    @contextlib.contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        """Show what is done, and for how long already: under the bar, or alone where none is."""
        self._doing, self._doing_since_s = what, time.perf_counter()
        alone = Live(
            get_renderable=self._doing_line,
            console=self.console,
            refresh_per_second=4,
            transient=True,
        )
        try:
            with contextlib.nullcontext() if self._is_stepping else alone:
                yield
        finally:
            self._doing = ""

    def _doing_line(self) -> Text:
        taken_s = time.perf_counter() - self._doing_since_s
        return Text(f"{self._doing}, {_clock(taken_s)} elapsed", style="dim")

    def _shown(self) -> RenderableType:
        lines: list[RenderableType] = [*self._progress()]
        if self._figures is not None:
            lines.append(Text(figures_line(self._figures)))
        if self._plan is not None:
            lines.append(Text(tiers_line(self._plan), style="dim"))
        if self._lanes is not None:
            lines.append(Text("lanes: " + lanes_line(self._lanes), style="dim"))
        if self._doing:
            lines.append(self._doing_line())
        return Group(*lines)

    def _progress(self) -> list[RenderableType]:
        """Return the bar and its times, in one line where there is room."""
        times = f"{_clock(time.perf_counter() - self._start_s)} elapsed"
        if self._figures is not None and self._num_done < self._num_steps:
            times += f", {_clock(self._left_s(self._figures))} left"
        what, count = "training", f"{self._num_done:,}/{self._num_steps:,}"
        room = self.console.width - len(f"{what} ") - len(f" {count}")
        bar_width = max(1, min(_BAR_WIDTH, room))
        bar = ProgressBar(total=self._num_steps, completed=self._num_done, width=bar_width)
        line = Table.grid(padding=(0, 1))
        if room - bar_width > len(times):
            line.add_row(what, bar, count, times)
            return [line]
        line.add_row(what, bar, count)
        return [line, Text(times)]


def display_for(console: Console, *, log_every: int) -> Display:
    """Return the live display on a terminal, plain lines elsewhere."""
    kind = LiveDisplay if console.is_terminal else Display
    return kind(console, log_every=log_every)


def step_line(figures: StepFigures) -> str:
    return f"step {figures.step:,}/{figures.num_steps:,}  {figures_line(figures)}"


def figures_line(figures: StepFigures) -> str:
    norm = "–" if figures.grad_norm is None else f"{figures.grad_norm:.3g}"
    tflops = f"{figures.tflops:,.1f}" if figures.tflops >= 1 else f"{figures.tflops:.3g}"
    more = "".join(f"{name} {value:.3g}  " for name, value in _shown_figures(figures.more))
    return (
        f"loss {figures.loss:.4f}  {more}norm {norm}  lr {figures.lr:.2e}  "
        f"{format_rate(figures.tokens_per_s)} tokens/s  {tflops} TFLOPS"
    )


def _shown_figures(more: dict[str, float]) -> list[tuple[str, float]]:
    """Return those for which a line has room, with short names."""
    return [(name, more[key]) for key, name in _SHORT_NAMES.items() if key in more]


def tiers_line(plan: Plan) -> str:
    used = ((tier, plan.tier_bytes(tier)) for tier in ("device", "host", "disk"))
    return "tiers: " + "  ".join(f"{tier} {format_bytes(size)}" for tier, size in used if size)


def lanes_line(measurement: Measurement) -> str:
    """Return the share of the step for which each lane worked."""
    busy = dict.fromkeys(LANES, 0.0)
    for span in measurement.spans:
        busy[span.lane] = busy.get(span.lane, 0.0) + span.end_s - span.start_s
    return "  ".join(
        f"{lane} {min(1.0, seconds / measurement.step_s):.0%}"
        for lane, seconds in busy.items()
        if seconds
    )


def _evaluation_line(number: int, total: int) -> str:
    return f"evaluating: batch {number:,} of {total:,}"


def _clock(seconds: float) -> str:
    """Return hours, minutes and seconds: of two figures alone nobody knows which they are."""
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest_s:02d}"
