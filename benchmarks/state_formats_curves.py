"""Draws what state_formats.py wrote: training loss over steps, and how far it is from fp32's.

    python benchmarks/state_formats_curves.py FILE.json --svg FILE

Each point of the curves is the mean of 25 steps, of the differences that of 100: the formats see
the same batches, and from one batch to the next the loss moves more than from format to format.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from charts import Axis, Line, Panel, drawing

CURVE_STEPS, DIFFERENCE_STEPS = 25, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="what state_formats.py wrote")
    parser.add_argument("--svg", type=Path, required=True, help="where the drawing goes")
    arguments = parser.parse_args()
    runs = json.loads(arguments.json.read_text())["runs"]
    curves = {name: run["curve"] for name, run in runs.items()}
    arguments.svg.write_text(picture(curves), encoding="utf-8")


def picture(curves: dict[str, list[float]]) -> str:
    num_steps = len(curves["fp32"])
    x = Axis(
        title="steps",
        ticks=[(n * num_steps // 4, f"{n * num_steps // 4:,}") for n in range(5)],
    )
    losses = Panel(
        title="Training loss",
        x=x,
        y=Axis(
            title="nats a byte", ticks=[(value / 2, f"{value / 2:g}") for value in range(2, 10)]
        ),
        lines=[Line(name=n, points=means(curve, CURVE_STEPS)) for n, curve in curves.items()],
    )
    differences = Panel(
        title="Beside fp32",
        x=x,
        y=Axis(
            title="difference in loss",
            ticks=[(n / 200, f"{n / 2:+.1f}%" if n else "0") for n in range(-3, 4)],
        ),
        lines=[
            Line(name=name, points=relative(curve, curves["fp32"]))
            for name, curve in curves.items()
        ],
    )
    return drawing("Training loss with each format of optimizer state", [losses, differences])


def means(values: Sequence[float], size: int) -> list[tuple[float, float]]:
    """Return the mean of every ``size`` values, at the last step of them."""
    return [
        (start + size, statistics.fmean(values[start : start + size]))
        for start in range(0, len(values) - size + 1, size)
    ]


def relative(curve: Sequence[float], of: Sequence[float]) -> list[tuple[float, float]]:
    pairs = zip(means(curve, DIFFERENCE_STEPS), means(of, DIFFERENCE_STEPS), strict=True)
    return [(step, loss / base - 1) for (step, loss), (_, base) in pairs]


if __name__ == "__main__":
    main()
