"""bars.sh runs what it says that it runs."""

from __future__ import annotations

import re

from benchmark_scripts import BENCHMARKS

TESTS = BENCHMARKS.parent / "tests"
# They take a GPU alone, or train again what the placements and figures of bars.sh train.
LEFT_OUT = {"bench", "checkpoint", "cli", "hf", "machine", "verify"}


def test_every_room_with_tests_that_need_a_gpu_is_run_or_left_out_on_purpose() -> None:
    found = re.search(r"for room in (.+); do", (BENCHMARKS / "bars.sh").read_text())
    assert found is not None
    marked = {
        path.parent.name
        for path in TESTS.glob("*/test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    }
    assert set(found[1].split()) == marked - LEFT_OUT
