"""What a terminal shows of a run, and what a log gets."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from train_files import step_figures

from outcore.train import display as display_module
from outcore.train.display import Display, LiveDisplay


class Clock:
    """Stands for ``time`` in the module of the display."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(display_module, "time", made)
    return made


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def shown(display: LiveDisplay) -> list[str]:
    paper = Console(file=io.StringIO(), width=display.console.width)
    with paper.capture() as captured:
        paper.print(display._shown())
    return captured.get().splitlines()


@pytest.mark.parametrize("step_s", [0.1, 10.0, 40.0, 3600.0])
def test_a_terminal_and_a_log_have_the_same_time_left(clock: Clock, step_s: float) -> None:
    log = Console(file=io.StringIO(), width=200)
    live, plain = LiveDisplay(terminal()), Display(log, log_every=1)
    with live.steps(0, 1000):
        for step, taken_s in enumerate((9 * step_s, step_s, step_s, step_s), 1):
            clock.now_s += taken_s
            live.step(step_figures(step, taken_s))
            plain.step(step_figures(step, taken_s))
        left = log.file.getvalue().split()[-2]  # type: ignore[attr-defined]
        assert shown(live)[0].endswith(f" elapsed, {left} left")
    hours, minutes, seconds = map(int, left.split(":"))
    assert 3600 * hours + 60 * minutes + seconds == pytest.approx(996 * step_s, abs=0.5)


def test_time_elapses_from_the_first_step_on(clock: Clock) -> None:
    live = LiveDisplay(terminal())
    clock.now_s += 500  # data is tokenised, a model loaded
    with live.steps(0, 1000):
        clock.now_s += 52
        assert shown(live)[0].endswith(" 0/1,000 0:00:52 elapsed")


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_times_are_whole_in_every_width(clock: Clock, width: int) -> None:
    live = LiveDisplay(terminal(width))
    with live.steps(10_000, 100_000):
        clock.now_s += 65
        live.step(step_figures(10_001, 65.0, num_steps=100_000))
        bar, *others = shown(live)
    assert len(bar) <= width
    assert "10,001/100,000" in bar
    times = "0:01:05 elapsed, 1624:58:55 left"
    assert times in (bar if width == 100 else others[0])


def test_nothing_is_left_after_the_last_step(clock: Clock) -> None:
    live = LiveDisplay(terminal())
    with live.steps(0, 1):
        clock.now_s += 5
        live.step(step_figures(1, 5.0, num_steps=1))
        assert shown(live)[0].endswith(" 1/1 0:00:05 elapsed")


def on_screen(display: LiveDisplay) -> str:
    return display.console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_what_comes_before_and_after_the_steps_is_seen_on_a_terminal() -> None:
    live = LiveDisplay(terminal())
    with live.loading():
        pass
    assert "loading the model, 0:00:00 elapsed" in on_screen(live)
    with live.steps(0, 1):
        pass
    with live.saving(Path("tuned")):
        pass
    assert "saving tuned, 0:00:00 elapsed" in on_screen(live)
    assert "saved tuned in 0.0 s" in on_screen(live)
    with live.evaluating():
        live.evaluation_batch(3, 1200)
    assert "evaluating: batch 3 of 1,200, 0:00:00 elapsed" in on_screen(live)


def test_an_evaluation_among_the_steps_is_a_line_under_the_bar() -> None:
    live = LiveDisplay(terminal())
    with live.steps(0, 9):
        with live.evaluating():
            live.evaluation_batch(2, 7)
            assert shown(live)[-1] == "evaluating: batch 2 of 7, 0:00:00 elapsed"
        assert len(shown(live)) == 1


def test_a_long_evaluation_is_told_now_and_then_in_a_log(clock: Clock) -> None:
    file = io.StringIO()
    plain = Display(Console(file=file, width=80))
    clock.now_s += 100
    with plain.evaluating():
        for number in range(1, 41):
            plain.evaluation_batch(number, 40)
            clock.now_s += 1
    lines = [f"evaluating: batch {number} of 40" for number in (17, 33)]
    assert file.getvalue().splitlines() == lines
