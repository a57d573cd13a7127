"""The page of a run: what it measured at the top, and lines that join only what can be compared."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from train_files import Files

from outcore.train import loop as loop_module
from outcore.train.display import Display
from outcore.train.metrics import read_metrics
from outcore.train.report_page import _held_out, report_page
from outcore.train.run import train
from outcore.units import format_bytes


def quiet() -> Display:
    return Display(Console(quiet=True))


def tiles_of(page: str) -> dict[str, str]:
    return dict(re.findall(r'<div class="tile"><dt>(.*?)</dt><dd>(.*?)</dd></div>', page))


def test_the_top_has_what_was_measured_also_of_a_short_run(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(loop_module, "write_report", lambda *args: given.extend(args))
    train(files.settings(max_steps=2), quiet())
    output, settings, plan, result = given
    assert result.measurement is None
    tiles = tiles_of(report_page(output, settings, plan, result))
    rates = [line["tokens_per_s"] for line in read_metrics(output)]
    assert tiles["measured tokens/s"] == f"{statistics.median(rates):,.0f}"
    assert {"measured step", "measured TFLOPS", "measured host peak"} <= tiles.keys()
    # Of a CPU's temporaries nobody knows; a GPU tells them.
    assert tiles["predicted device peak"] == format_bytes(plan.tier_bytes("device"))
    whole = tiles_of(report_page(output, settings, plan, replace(result, unmeasured_bytes=0)))
    (peak_bytes,) = (tier.peak_bytes for tier in result.tiers if tier.tier == "device")
    assert whole["measured device peak"] == format_bytes(peak_bytes)


@pytest.mark.parametrize(
    ("sets", "num_points"),
    [
        (["a", "a", "a", "a"], [4]),
        (["a", "a", "b", "b"], [2, 2]),
        (["a", "b", "a", "a"], [1, 1, 2]),
        ([None, None, None, None], [4]),  # older lines
        ([None, None, "b", "c"], [3, 1]),
    ],
)
def test_losses_of_two_sets_are_not_joined(sets: list[str | None], num_points: list[int]) -> None:
    lines: list[dict[str, Any]] = []
    for number, name in enumerate(sets):
        step = 2 * number + 2
        known = {} if name is None else {"held_out": name}
        lines.append({"kind": "train", "step": step, "loss": 1.0})
        lines.append({"kind": "eval", "step": step, **known, "loss": 1.0})
    series = _held_out(lines, "loss")
    assert [len(part) for part in series.parts] == num_points
    assert ("a line for each set" in series.name) is (len(num_points) > 1)
