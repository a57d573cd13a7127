"""The catalogue: complete, sourced, in sane ranges; and names that answer."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import outcore
from outcore.machine import Machine, catalogue_names, machine_named, named
from outcore.machine.catalogue import catalogue_note
from outcore.machine.probe import ProbeReport

WANTED = {
    "v100-pcie3",
    "a100-pcie4-40gb",
    "a100-pcie4-80gb",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "h100-pcie5",
    "h200-pcie5",
    "b200",
    "gh200",
    "gb200",
    "dgx-spark",
    "m4-max",
    "m3-ultra",
    "m5-max",
    "mi300x",
    "cpu-laptop",
}
UNIFIED = {"dgx-spark", "m4-max", "m3-ultra", "m5-max", "cpu-laptop"}
NOT_FIGURES = {"name", "device_name", "is_unified", "has_gpu_direct_storage", "sources"}
# Least and most that is believed of anything in the catalogue.
RANGES = {
    "device_memory_bytes": (8 * 2**30, 600 * 2**30),
    "host_memory_bytes": (16 * 2**30, 2**41),
    "num_cores": (4, 256),
    "disk_bytes": (32 * 2**30, 2**44),
    "disk_read_bytes_s": (1e9, 20e9),
    "disk_write_bytes_s": (0.5e9, 20e9),
    "disk_both_ways_bytes_s": (0.3e9, 20e9),
    "to_device_bytes_s": (5e9, 450e9),
    "to_host_bytes_s": (5e9, 450e9),
    "both_ways_bytes_s": (5e9, 450e9),
    "pageable_bytes_s": (2e9, 450e9),
    "host_read_bytes_s": (20e9, 1e12),
    "host_copy_bytes_s": (20e9, 1e12),
    "host_update_bytes_s": (20e9, 1e12),
    "matmul_flops_s": (1e11, 3e15),
    "fp8_matmul_flops_s": (1e14, 6e15),
    "attention_forward_flops_s": (1e11, 3e15),
    "attention_backward_flops_s": (1e11, 3e15),
    "device_memory_bytes_s": (20e9, 10e12),
    "price_per_hour": (0.1, 20),
}


@pytest.fixture(params=sorted(WANTED))
def machine(request: pytest.FixtureRequest) -> Machine:
    return machine_named(request.param)


def test_every_machine_is_there() -> None:
    assert set(catalogue_names()) == WANTED


def test_every_figure_has_a_source_and_every_source_a_figure(machine: Machine) -> None:
    figures = {field.name for field in fields(Machine)} - NOT_FIGURES
    given = {name for name in figures if getattr(machine, name) is not None}
    assert set(machine.sources) == given
    assert all(len(source) > 5 for source in machine.sources.values())
    assert set(RANGES) == figures


def test_figures_are_in_sane_ranges(machine: Machine) -> None:
    for name, (least, most) in RANGES.items():
        value = getattr(machine, name)
        assert value is None or least <= value <= most, f"{name} = {value}"
    assert machine.both_ways_bytes_s <= max(machine.to_device_bytes_s, machine.to_host_bytes_s)
    assert machine.disk_both_ways_bytes_s <= machine.disk_write_bytes_s
    assert machine.pageable_bytes_s <= machine.to_device_bytes_s
    assert machine.attention_backward_flops_s <= machine.attention_forward_flops_s
    assert machine.attention_forward_flops_s <= machine.matmul_flops_s
    if machine.fp8_matmul_flops_s is not None:
        assert 1.3 <= machine.fp8_matmul_flops_s / machine.matmul_flops_s <= 2.1


def test_both_ways_at_once_fit_through_the_memory_of_the_host(machine: Machine) -> None:
    if not machine.is_unified:
        assert 2 * machine.both_ways_bytes_s <= machine.host_read_bytes_s / 0.85


def test_one_gpu_of_several_has_its_share_of_the_host_and_of_the_price() -> None:
    superchip, one = machine_named("gh200"), machine_named("gb200")  # one Grace for one, for two
    for name in ("host_memory_bytes", "num_cores", "host_read_bytes_s", "host_update_bytes_s"):
        assert 2 * getattr(one, name) == pytest.approx(getattr(superchip, name))
    assert one.price_per_hour == pytest.approx(9.08 / 2)
    eighth = machine_named("b200")  # of two sockets with eight channels at 4800 MT/s each
    assert eighth.host_update_bytes_s < eighth.host_read_bytes_s < 2 * 8 * 4.8e9 * 8 / 8


def test_one_memory_is_marked(machine: Machine) -> None:
    assert machine.is_unified == (machine.name in UNIFIED)
    if machine.is_unified:
        assert machine.device_memory_bytes <= machine.host_memory_bytes


def test_the_reference_machine_is_measured() -> None:
    machine = machine_named("h200-pcie5")
    assert machine.to_device_bytes_s == 55.1e9
    assert machine.matmul_flops_s == 673e12
    assert machine.device_memory_bytes == int(139.2 * 2**30)
    not_measured = {
        name for name, source in machine.sources.items() if not source.startswith("h200-pcie5: me")
    }
    assert not_measured == {"price_per_hour"}


def test_what_is_estimated_from_a_peak_says_the_fraction_that_it_is() -> None:
    """Sources of the form "f x p TFLOPS" or "f x b GB/s" must give the figure beside them."""
    num_checked = 0
    for name in catalogue_names():
        machine = machine_named(name)
        for field, source in machine.sources.items():
            words = source.removeprefix("estimated: ").split()
            if len(words) < 4 or words[1] != "x" or words[3] not in ("TFLOPS", "GB/s"):
                continue
            try:
                unit = 1e12 if words[3] == "TFLOPS" else 1e9
                expected = float(words[0]) * float(words[2]) * unit
            except ValueError:
                continue
            assert getattr(machine, field) == pytest.approx(expected, rel=0.02), (name, field)
            num_checked += 1
    assert num_checked > 50


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("rtx-4080", "did you mean rtx-4090"),
        ("RTX 4090", "did you mean rtx-4090"),
        ("h200", "did you mean h200-pcie5 or"),
        ("a100", "a100-pcie4-40gb or a100-pcie4-80gb"),
        ("h200", "h200-pcie5"),
        ("zzz", "known: here, a100-pcie4-40gb"),
        ("", "known: here"),
        ("../catalogue/gh200", "no machine named"),
    ],
)
def test_unknown_names_get_the_close_ones(asked: str, answer: str) -> None:
    with pytest.raises(ValueError, match="no machine named") as caught:
        machine_named(asked)
    assert answer in str(caught.value)


def test_here_is_probed(quick_report: ProbeReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "here", lambda **_: quick_report.machine)
    assert machine_named("here").name == "here"


def test_a_plan_here_is_for_the_disk_that_it_names(
    quick_report: ProbeReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path | None] = []

    def probe(*, disk: Path | None, progress: Any) -> ProbeReport:
        asked.append(disk)
        return quick_report

    monkeypatch.setattr("outcore.machine.probe.probe", probe)
    job = {"tokens": 256, "seq_len": 256}
    outcore.plan("smollm2-135m", **job, disk=f"{tmp_path}:10GiB")
    outcore.plan("smollm2-135m", **job)
    assert asked == [tmp_path, None]


def test_notes_say_what_a_figure_cannot() -> None:
    assert "SXM" in (catalogue_note("h100-pcie5") or "")
    assert "no M4 Ultra" in (catalogue_note("m3-ultra") or "")
    assert catalogue_note("rtx-4090") is None


def test_the_documentation_lists_every_machine() -> None:
    page = (Path(__file__).parents[2] / "docs" / "machine.md").read_text(encoding="utf-8")
    assert [name for name in catalogue_names() if f"`{name}`" not in page] == []
