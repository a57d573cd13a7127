"""Streamed and resident steps over tokens, predicted and as the H200 box measured them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_predictions import RESULTS, probed

from outcore.model_spec import model_spec
from outcore.planning.choices import Choice
from outcore.planning.plan import Job
from outcore.planning.search import plan_of
from outcore.shapes import shape_config

FILE = "2026-11-16-h200-bandwidth-wall-tokens.json"
ROWS = {row["resident"]["tokens"]: row for row in json.loads((RESULTS / FILE).read_text())["rows"]}


def predicted_s(tokens: int, *, streamed: bool) -> float:
    """As benchmarks/bandwidth_wall_measured.py places it: all on the host, or on the device."""
    spec = model_spec(shape_config("qwen2.5-3b"))
    n = len(spec.blocks)
    resident = Choice(first_device_weights=n, first_device_state=n, edge_state=0)
    choice = Choice(num_visits=3) if streamed else resident
    job = Job(tokens=tokens, seq_len=1024, clipping="none")
    machine = probed("2026-11-16-h200-plans-clipping-probe.json")
    return plan_of(spec, machine, job, choice.placement(n, 8)).prediction.step_s


@pytest.mark.parametrize("tokens", ROWS)
def test_resident_steps(tokens: int) -> None:
    measured: dict[str, Any] = ROWS[tokens]["resident"]
    assert predicted_s(tokens, streamed=False) == pytest.approx(measured["measured_s"], rel=0.02)


@pytest.mark.parametrize("tokens", ROWS)
def test_streamed_steps(tokens: int) -> None:
    measured: dict[str, Any] = ROWS[tokens]["streamed"]
    assert predicted_s(tokens, streamed=True) == pytest.approx(measured["measured_s"], rel=0.05)
