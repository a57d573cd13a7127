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
from outcore.train.report_page import report_page
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
