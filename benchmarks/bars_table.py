"""What bars.sh measured beside what a build is held to, from the raw figures in a folder.

    python benchmarks/bars_table.py FOLDER

A bar whose figures are not there is named as such, and is missed where what should have them cannot
be read. The exit status is how many are missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
NUM_PLACEMENTS = 14
NUM_PREDICTED = 8
TIERS = ("device", "host", "disk")
_LEAST_TFLOPS = {"7b": 500, "14b": 420, "32b-compact": 400}
_SETTINGS = (*_LEAST_TFLOPS, "7b-native", "8b-long-clip", "72b-minimal-clip", "3b-disk-wait")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One figure beside its bar; ``is_held`` is None where there is none to hold."""

    name: str
    measured: str
    bar: str
    is_held: bool | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    bars = list(all_bars(parser.parse_args().folder))
    widths = [max(len(row) for row in column) for column in zip(*map(_cells, bars), strict=True)]
    for bar in bars:
        print("  ".join(f"{c:{w}s}" for c, w in zip(_cells(bar), widths, strict=True)).rstrip())
    sys.exit(sum(bar.is_held is False for bar in bars))


def _cells(bar: Bar) -> tuple[str, ...]:
    verdict = {True: "held", False: "MISSED", None: ""}[bar.is_held]
    return bar.name, bar.measured, bar.bar, verdict


def all_bars(folder: Path) -> Iterator[Bar]:
    parts: dict[str, Callable[[Path], Iterator[Bar]]] = {
        "probe": probe_bars,
        "plans": plan_bars,
        "predictions": prediction_bars,
        "the same bits": exactness_bars,
        "outcore train": train_bars,
        "loading": loading_bars,
        "LoRA, 72B": lora_bars,
        "checkpoints": checkpoint_bars,
        "SmolLM2": smollm2_bars,
    }
    for name, part in parts.items():
        try:
            yield from list(part(folder)) or [_not_measured(name)]
        except json.JSONDecodeError as error:  # a script that failed has left an empty file
            measured = f"cannot be read: {error}"
            yield Bar(name=name, measured=measured, bar="", is_held=False)


def probe_bars(folder: Path) -> Iterator[Bar]:
    for path in sorted(folder.glob("probe-*.json")):
        yield _at_most("probe", json.loads(path.read_text())["seconds"], 60, "{:.0f} s")


def plan_bars(folder: Path) -> Iterator[Bar]:
    rows = plan_rows(folder)
    for setting, row in rows.items():
        if "failed" in row:
            yield Bar(name=setting, measured="failed", bar="to the end", is_held=False)
    for setting in _SETTINGS:
        if setting not in rows:
            yield _not_measured(setting)
    rows = {setting: row for setting, row in rows.items() if "failed" not in row}
    for setting, least in _LEAST_TFLOPS.items():
        if setting in rows:
            yield _at_least(setting, rows[setting]["tflops"], least, "{:.1f} TFLOPS")
    if "7b" in rows and "7b-native" in rows:
        times = rows["7b"]["tflops"] / rows["7b-native"]["tflops"]
        yield _at_least("7b over native PyTorch", times, 1.0, "{:.2f}x")
    for setting, row in rows.items():
        if setting.startswith("8b-long"):
            tokens = row["tokens_per_s"] * row["step_s"]
            yield _at_least(f"{setting}, one sequence", tokens, 65_536, "{:,.0f} tokens")
            peak = row["device_peak_bytes"] / GIB
            yield _at_most(f"{setting}, of the device", peak, 24, "{:.1f} GiB")
    if "72b-minimal-clip" in rows:
        row = rows["72b-minimal-clip"]
        lane = row["notes"]["plan"]["plan"]["prediction"]["binding_lane"]
        yield Bar(
            name="72b-minimal-clip",
            measured=f"{row['step_s']:.1f} s a step, {row['tokens_per_s']:.0f} tokens/s, {lane}",
            bar="3 steps to the end",
            is_held=1 + len(row["all_step_s"]) >= 3,  # one of warm-up
        )
    if "disk" in rows.get("3b-disk-wait", {}):  # as the disk was just then
        row = rows["3b-disk-wait"]
        each_way = row["notes"]["prediction"]["disk peak"]["measured"] / row["step_s"]
        for when in ("before", "after"):
            share = each_way / row["disk"][when]["both_ways_bytes_s"]
            bar = _at_least(f"3b-disk-wait, of the disk just {when}", share, 0.85, "{:.1%}")
            yield bar if when == "before" else _without_bar(bar)


def prediction_bars(folder: Path) -> Iterator[Bar]:
    predictions = {
        name: row["notes"]["prediction"]
        for name, row in plan_rows(folder).items()
        if "prediction" in row.get("notes", {})
    }
    if (lora := _read(folder / "lora-72b.json")) is not None:
        predictions["lora-72b"] = lora["prediction"]
    if predictions:
        yield Bar(
            name="settings with a prediction",
            measured=f"{len(predictions)}",
            bar=f"at least {NUM_PREDICTED}",
            is_held=True if len(predictions) >= NUM_PREDICTED else None,  # some were left out
        )
    for name, found in predictions.items():
        for what, most in [("step", 0.10), *((f"{tier} peak", 0.05) for tier in TIERS)]:
            if (figures := found.get(what)) is not None and figures["measured"]:
                error = figures["predicted"] / figures["measured"] - 1
                yield Bar(
                    name=f"{name}: {what} predicted",
                    measured=f"{error:+.1%}",
                    bar=f"within {most:.0%}",
                    is_held=abs(error) <= most,
                )


def exactness_bars(folder: Path) -> Iterator[Bar]:
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("verify-*.json"))]
    found = {p["name"]: p["is_exact"] for file in files for p in file["placements"]}
    if found:
        yield Bar(
            name=f"{files[0]['model']}: placements with the same bits",
            measured=f"{sum(found.values())} of {len(found)}",
            bar=f"all of {NUM_PLACEMENTS}",
            is_held=all(found.values()) and len(found) == NUM_PLACEMENTS,
        )


def train_bars(folder: Path) -> Iterator[Bar]:
    if (file := _read(folder / "train-command.json")) is None:
        return
    train, engine = file["train"], file["engine"]
    longer = train["step_s"] / engine["step_s"] - 1
    yield _at_most("outcore train over the engine", longer, 0.02, "{:+.1%}")
    yield _at_most("waiting for data", 1e3 * train["data_wait_s"], 2.0, "{:.2f} ms a step")
    loads_bytes_s = file["disk"][0]["num_bytes"] / train["load_s"]
    for path in sorted(folder.glob("probe-*.json")):
        read_bytes_s = json.loads(path.read_text())["disk"]["read_bytes_s"]
        share = loads_bytes_s / read_bytes_s
        yield _at_least("outcore train loads, of the probe's disk", share, 0.8, "{:.1%}")
    for when, alone in zip(("before", "after"), file["disk"], strict=True):
        share = loads_bytes_s / alone["alone_bytes_s"]
        yield _without_bar(
            _at_least(f"outcore train loads, of reading alone {when}", share, 0.8, "{:.1%}")
        )
    first_s = train["first_step_after_s"] - train["in_homes_after_s"]
    yield _at_most("the first step after loading", first_s, 30, "{:.1f} s")


def loading_bars(folder: Path) -> Iterator[Bar]:
    if (file := _read(folder / "loading-7b.json")) is not None:
        share = file["median"]["of_disk"]
        yield _at_least("loading, of reading alone", share, 0.8, "{:.1%}")


def lora_bars(folder: Path) -> Iterator[Bar]:
    if (file := _read(folder / "lora-72b.json")) is not None:
        yield _at_least("LoRA, 72B", file["tflops"], 300, "{:.1f} TFLOPS")
        peak = file["device_peak_bytes"] / GIB
        yield _at_most("LoRA, 72B, of the device", peak, 24, "{:.1f} GiB")


def checkpoint_bars(folder: Path) -> Iterator[Bar]:
    if (file := _read(folder / "checkpoint.json")) is not None:
        yield _at_most("steps while a checkpoint is written", file["longer"], 0.05, "{:+.1%}")


def smollm2_bars(folder: Path) -> Iterator[Bar]:
    if (file := _read(folder / "smollm2.json")) is not None:
        ours, plain = (100 * file[system]["exact_match"] for system in ("outcore", "plain"))
        apart = abs(ours - plain)
        before = 100 * file["before"]["exact_match"]
        name = f"SmolLM2, from {before:.1f}% to {ours:.1f}%, plain {plain:.1f}%"
        yield _at_most(name, apart, 0.5, "{:.1f} points apart")


def plan_rows(folder: Path) -> dict[str, Any]:
    """Return the rows of all plans by setting; those that did not end say how they failed."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("plans-*.json"))]
    return {row["setting"]: row for file in files for row in file["rows"]}


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def _not_measured(name: str) -> Bar:
    return Bar(name=name, measured="not measured", bar="", is_held=None)


def _at_least(name: str, value: float, least: float, shown: str) -> Bar:
    bar = f"at least {shown.format(least)}"
    return Bar(name=name, measured=shown.format(value), bar=bar, is_held=value >= least)


def _at_most(name: str, value: float, most: float, shown: str) -> Bar:
    bar = f"at most {shown.format(most)}"
    return Bar(name=name, measured=shown.format(value), bar=bar, is_held=value <= most)


def _without_bar(bar: Bar) -> Bar:
    """Return a figure that stands beside another one for the reader."""
    return Bar(name=bar.name, measured=bar.measured, bar="", is_held=None)


if __name__ == "__main__":
    main()
