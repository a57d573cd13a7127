"""The tables of all commands in terminals of 60, 80 and 100 columns: every figure is there."""

from __future__ import annotations

import re

import pytest
from handmade_plans import GIB, make_machine, make_plan
from rich.console import Console, RenderableType

from outcore.bench.job import BenchResult, BenchRow
from outcore.cli.bench_table import BenchTable
from outcore.cli.compare_table import comparison_report
from outcore.cli.probe_table import catalogue_table
from outcore.cli.verify_table import VerifyTable
from outcore.machine import catalogue_names, machine_named
from outcore.planning.compare import compare
from outcore.verify import Comparison, TrainedRun
from outcore.views.explain import explain
from outcore.views.side_by_side import Measurement, side_by_side, side_by_side_table

WIDTHS = (60, 80, 100)


def shown(table: RenderableType, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    return text


def figures(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*", text))


def test_a_plan_and_the_catalogue_in_half_a_terminal() -> None:
    plan = explain(make_plan(), machine=make_machine())
    assert figures(shown(plan, 28)) == figures(shown(plan, 200))
    text = shown(plan, 40)
    assert "too narrow for: of budget" in text
    assert re.search(r"\n  busy s: [\d.]+\n  of the step: \S+ +\d+%\n  binds\n", text)
    catalogue = catalogue_table([machine_named(name) for name in catalogue_names()])
    assert figures(shown(catalogue, 40)) == figures(shown(catalogue, 200))


def test_a_comparison_in_half_a_terminal_says_of_how_many_tokens() -> None:
    question = {"num_parameters": 7_600_000_000, "hidden_size": 3584, "train_tokens": 1e13}
    text = shown(comparison_report(compare(make_plan(), make_machine(), **question)), 40)
    assert text.splitlines()[:3] == ["10 T tokens:", "offloading", "  GPUs: 1"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan(width: int) -> None:
    table = explain(make_plan(), machine=make_machine())
    text = shown(table, width)
    assert figures(text) == figures(shown(table, 200))
    homes = next(line for line in text.splitlines() if line.startswith("blocks 2-21"))
    assert homes.split() == ["blocks", "2-21", "host", "host", "host", "recompute"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_comparison_and_a_run_beside_its_plan(width: int) -> None:
    plan, machine = make_plan(), make_machine()
    question = {"num_parameters": 7_600_000_000, "hidden_size": 3584, "train_tokens": 1e13}
    answer = comparison_report(compare(plan, machine, **question))
    measured = Measurement(step_s=5.3, peak_bytes={"device": 110 * GIB, "host": 2048 * GIB})
    for table in (answer, side_by_side_table(side_by_side(plan, measured))):
        assert figures(shown(table, width)) == figures(shown(table, 200))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_catalogue(width: int) -> None:
    machines = [machine_named(name) for name in catalogue_names()]
    text = shown(catalogue_table(machines), width)
    row = next(line.split() for line in text.splitlines() if line.startswith("h200-pcie5 "))
    wide = ["139", "125", "55.1", "163.6", "2.7/1.9", "673", "1,283", "4.00"]
    narrow = ["139", "125", "55.1", "163.6", "673", "4.00"]
    assert row[1:] == (wide if width >= 80 else narrow)
    assert ("too narrow for: fp8 TFLOPS, disk GB/s" in text) == (width < 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_verification(width: int) -> None:
    names = ["weights and state on disk", "three tiers, random delays"]
    table = VerifyTable(names)
    digests = {f"tensor {n}": "" for n in range(1311)}
    table.resident_done(TrainedRun(losses=[1.0], digests=digests, seconds=1234.5))
    for name in names:
        table.placement_done(
            Comparison(name=name, losses_equal=True, differing=[], num_tensors=1311, seconds=2345.6)
        )
    text = shown(table, width)
    for name in names:
        row = next(line for line in text.splitlines() if line.startswith(name))
        assert "1311 of 1311" in row
        assert "same bits" in row
    assert ("too narrow for: losses" in text) == (width < 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_benchmark(width: int) -> None:
    rows: list[BenchRow] = [
        BenchResult(
            name=name,
            step_s=step_s,
            all_step_s=[step_s],
            first_step_s=1.0,
            tokens_per_s=27_238,
            tflops=529.0,
            device_peak_bytes=115 * GIB,
            device_reserved_bytes=0,
            host_rss_bytes=144 * GIB,
            loss=1.0,
            notes={"optimizer_state": "host, fp32", "fp32_master": True, "clipping": False},
        )
        for name, step_s in (("outcore", 12.345), ("deepspeed", 23.456))
    ]
    text = shown(BenchTable(["outcore", "deepspeed"], rows), width)
    row = next(line.split() for line in text.splitlines() if line.startswith("deepspeed"))
    assert row[1:6] == ["529", "27,238", "23.456", "115.0", "144.0"]
    assert row[-1] == "1.90x"
    assert ("too narrow for: clip, fp32 master" in text) == (width < 80)
