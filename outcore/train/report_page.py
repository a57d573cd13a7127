"""The page at the end of a run: losses, speed, the plan beside what was measured, versions."""

from __future__ import annotations

import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers

import outcore
from outcore.planning.plan import Plan
from outcore.train.chart import Series, line_chart
from outcore.train.figures import TrainResult
from outcore.train.metrics import read_metrics
from outcore.train.settings import TrainSettings, to_dict
from outcore.units import format_bytes
from outcore.views.page import plan_page
from outcore.views.page_text import table, text
from outcore.views.page_tiles import RunFigures

FILE_NAME = "report.html"


def write_report(output: Path, settings: TrainSettings, plan: Plan, result: TrainResult) -> Path:
    """Write the self-contained page of a run into its output directory."""
    path = output / FILE_NAME
    path.write_text(report_page(output, settings, plan, result), encoding="utf-8")
    return path


def report_page(output: Path, settings: TrainSettings, plan: Plan, result: TrainResult) -> str:
    """Return the page's HTML."""
    lines = read_metrics(output)
    return plan_page(
        plan,
        measured=result.measurement,
        figures=_figures(lines, result),
        title=f"{Path(settings.model).name} trained on {Path(settings.data[0]).name}",
        first=(
            ("How it went", _summary(result)),
            (
                "Loss",
                line_chart(
                    "loss over steps",
                    [
                        Series(name="training", points=_points(lines, "train", "loss")),
                        _held_out(lines, "loss"),
                    ],
                ),
            ),
            *_rewards(lines),
            (
                "Throughput",
                line_chart(
                    "tokens a second over steps",
                    [
                        Series(
                            name="tokens/s, without padding",
                            points=_points(lines, "train", "tokens_per_s"),
                        )
                    ],
                ),
            ),
            (
                "Gradient norm",
                line_chart(
                    "gradient norm over steps",
                    [Series(name="norm", points=_points(lines, "train", "grad_norm"))],
                ),
            ),
            ("Memory that was used", _memory(result)),
        ),
        last=(("Settings", _settings(settings)), ("Versions", _versions())),
    )


def _figures(lines: list[dict[str, Any]], result: TrainResult) -> RunFigures:
    """Return medians over the steps, and what the tiers held at most."""
    medians = {
        name: statistics.median(value for _, value in points)
        for name in ("step_s", "tokens_per_s", "tflops")
        if (points := _points(lines, "train", name))
    }
    peaks = {tier.tier: tier.peak_bytes for tier in result.tiers}
    if result.unmeasured_bytes:  # the books alone are not all of it
        peaks.pop("device", None)
    return RunFigures(**medians, peak_bytes=peaks)


def _rewards(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return charts of what DPO tells beside its loss, where this is DPO."""
    charts = []
    for heading, name in (
        ("Reward accuracy", "rewards/accuracies"),
        ("Reward margin", "rewards/margins"),
    ):
        series = [
            Series(name="training", points=_points(lines, "train", name)),
            _held_out(lines, name),
        ]
        if any(one.points for one in series):
            charts.append((heading, line_chart(f"{name} over steps", series)))
    return charts


def _held_out(lines: list[dict[str, Any]], name: str) -> Series:
    """Return what was evaluated, in a line for each set that was held out."""
    breaks: list[float] = []
    before = None
    for line in lines:
        # Older lines do not say which set they are of.
        if line["kind"] == "eval" and (now := line.get("held_out")) is not None:
            if before not in (None, now):
                breaks.append(line["step"])
            before = now
    called = "held out" if not breaks else "held out (a line for each set)"
    return Series(name=called, points=_points(lines, "eval", name), breaks=breaks)


def _points(lines: list[dict[str, Any]], kind: str, name: str) -> list[tuple[float, float]]:
    return [
        (line["step"], line[name])
        for line in lines
        if line["kind"] == kind and line.get(name) is not None
    ]


def _summary(result: TrainResult) -> str:
    sentences = [
        f"{result.step:,} of {result.num_steps:,} steps, {result.seconds:,.0f} s in this process"
    ]
    if result.stopped_by:
        what, goes_on = f"stopped by {result.stopped_by}", "; --resume goes on"
        if result.is_complete:
            what = f"the last evaluation was broken off by {result.stopped_by}"
            goes_on = "; --resume makes up for it"
        sentences.append(what + (goes_on if result.is_resumable else ""))
    if result.loss is not None:
        sentences.append(f"last training loss {result.loss:.4f}")
    if result.eval_loss is not None:
        sentences.append(f"held-out loss {result.eval_loss:.4f}")
    return "".join(f"<p>{text(sentence)}</p>" for sentence in sentences)


def _memory(result: TrainResult) -> str:
    rows = [
        [
            text(tier.tier),
            text(format_bytes(tier.peak_bytes)),
            text("–" if tier.budget_bytes is None else format_bytes(tier.budget_bytes)),
            text(", ".join(f"{k} {format_bytes(v)}" for k, v in tier.purposes.items() if v)),
        ]
        for tier in result.tiers
    ]
    return table("Memory that was used", ["tier", "peak", "budget", "holds"], rows, numbers=(1, 2))


def _settings(settings: TrainSettings) -> str:
    rows = [
        [text(name), text(", ".join(value) if isinstance(value, tuple) else value)]
        for name, value in to_dict(settings).items()
        if value not in (None, ())
    ]
    return table("Settings", ["setting", "value"], rows)


def _versions() -> str:
    versions = {
        "outcore": outcore.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        versions["GPU"] = torch.cuda.get_device_name()
    return table("Versions", ["what", "version"], [[text(k), text(v)] for k, v in versions.items()])
