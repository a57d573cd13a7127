"""The probe on this machine, with small sizes: figures that can be true, and steps in order."""

import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.machine import Machine, here
from outcore.machine.probe import QUICK, ProbeReport, probe, run
from outcore.machine.probe.facts import find_facts, free_memory, probe_device
from outcore.machine.probe.gpu_direct_storage import WORKS, try_gpu_direct_storage
from outcore.machine.probe.report import DiskFigures
from outcore.machine.probe.run import STEPS
from outcore.machine.probe.sizes import ProbeSizes
from outcore.machine.probe.timing import seconds_per_call


def test_all_rates_are_positive_and_plausible(quick_report: ProbeReport) -> None:
    machine = quick_report.machine
    assert quick_report.seconds < 20
    for field in fields(Machine):
        value = getattr(machine, field.name)
        if field.name.endswith("_bytes_s"):
            assert 1e6 < value < 1e14, field.name
        elif field.name.endswith("_flops_s") and value is not None:
            assert 1e7 < value < 1e16, field.name
    assert 2**28 < machine.host_memory_bytes < 2**45
    assert machine.num_cores >= 1
    assert machine.disk_bytes > 0


def test_each_figure_says_that_it_was_measured(quick_report: ProbeReport) -> None:
    machine = quick_report.machine
    assert machine.name == "here"
    for field in fields(Machine):
        if field.name.endswith(("_bytes", "_bytes_s", "_flops_s")) and getattr(machine, field.name):
            assert "measured" in machine.sources[field.name]


def test_copies_are_measured_in_every_size(quick_report: ProbeReport) -> None:
    sizes = [piece.piece_bytes for piece in quick_report.link.pieces]
    assert sizes == list(QUICK.copy_piece_bytes)
    assert quick_report.machine.to_host_bytes_s == quick_report.link.pieces[-1].to_host_bytes_s


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_is_the_device_and_that_is_said(quick_report: ProbeReport) -> None:
    assert quick_report.facts.device_type == "cpu"
    assert quick_report.device.dtype == "float32"
    assert quick_report.device.fp8_matmul_flops_s is None
    assert quick_report.gpu_direct_storage == "no GPU"
    assert any("no GPU" in note for note in quick_report.notes)
    machine = quick_report.machine
    assert machine.is_unified
    assert not machine.has_gpu_direct_storage
    assert machine.device_memory_bytes == machine.host_memory_bytes


def test_a_report_survives_json(quick_report: ProbeReport) -> None:
    assert ProbeReport.from_dict(quick_report.to_dict()) == quick_report


def test_steps_are_announced_in_order_and_a_busy_machine_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (10_000.0, 0.0, 0.0))
    seen: list[tuple[str, int, int]] = []
    report = probe(
        sizes=QUICK,
        disk=tmp_path,
        cache_folder=tmp_path / "cache",
        progress=lambda *step: seen.append(step),
    )
    assert seen == [(name, number, len(STEPS)) for number, name in enumerate(STEPS, 1)]
    assert "the machine was busy (load 10000.0" in report.notes[0]


def test_here_is_the_kept_report(
    quick_report: ProbeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def measure(*arguments: Any) -> ProbeReport:
        *_, fingerprint, _, progress = arguments
        progress("link", 1, 1)
        return replace(quick_report, fingerprint=fingerprint)

    monkeypatch.setattr(run, "_measure", measure)
    for _ in range(2):
        machine = here(progress=lambda name, *_: steps.append(name))
        assert machine.matmul_flops_s == quick_report.device.matmul_flops_s
    assert steps == ["link"]  # the second time it was read


def test_memory_that_is_free_does_not_exceed_what_there_is() -> None:
    device = probe_device()
    facts, free = find_facts(device), free_memory(device)
    assert 0 < free.host_bytes <= facts.host_total_bytes
    assert 0 < free.device_bytes <= facts.device_total_bytes


def test_what_the_allocator_keeps_of_a_released_model_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = 100 << 30

    def empty_cache() -> None:
        nonlocal kept
        kept = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((139 << 30) - kept, 140 << 30))
    assert free_memory(torch.device("cuda")).device_bytes == 139 << 30


def test_sizes_shrink_on_a_small_machine() -> None:
    free = run.FreeMemory(device_bytes=32 << 20, host_bytes=32 << 20)
    sizes = run._that_fit(QUICK, free)
    assert sizes.copy_piece_bytes == (1 << 20, 4 << 20)
    assert sizes.host_bytes == 4 << 20
    assert sizes.update_params * 14 <= 4 << 20
    tiny = run._that_fit(QUICK, run.FreeMemory(device_bytes=1, host_bytes=1))
    assert tiny.copy_piece_bytes == (1 << 20,)


def test_another_disk_is_measured_in_memory_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    report = probe(sizes=QUICK, disk=tmp_path, cache_folder=tmp_path)
    asked: list[int] = []

    def measure(folder: Path, sizes: ProbeSizes, *, pin: bool) -> DiskFigures | None:
        asked.append(sizes.disk_memory_bytes)
        return report.disk

    monkeypatch.setattr(run, "measure_disk", measure)
    free = run.FreeMemory(device_bytes=32 << 20, host_bytes=32 << 20)
    monkeypatch.setattr(run, "free_memory", lambda _: free)
    probe(sizes=QUICK, disk=other, cache_folder=tmp_path)
    assert asked == [4 << 20]


def test_a_disk_in_memory_is_no_disk_to_a_plan(quick_report: ProbeReport) -> None:
    disk = quick_report.disk
    assert isinstance(disk, DiskFigures)
    machine = replace(quick_report, disk=replace(disk, is_memory=True)).machine
    assert machine.disk_bytes == 0
    assert machine.disk_read_bytes_s == 0.0
    assert "disk_bytes" not in machine.sources


def test_a_call_is_timed_by_its_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call in five that is slowed down by others does not count."""
    clock = iter(range(10**9))
    elapsed = {"now": 0.0, "calls": 0}

    def call() -> None:
        elapsed["calls"] += 1
        elapsed["now"] += 5.0 if elapsed["calls"] % 5 == 0 else 0.01

    monkeypatch.setattr("time.perf_counter", lambda: elapsed["now"] + 1e-12 * next(clock))
    measured = seconds_per_call(call, device=torch.device("cpu"), seconds=1.0)
    assert measured == pytest.approx(0.01, rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_direct_storage_that_fails_gives_a_reason_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_gds_register_handle", lambda *_: None, raising=False)
    reason = try_gpu_direct_storage(torch.device("cuda"), tmp_path)
    assert "CUDA" in reason or "NVIDIA" in reason  # a build without it, or no driver
    assert reason != WORKS
    assert list(tmp_path.iterdir()) == []
    assert try_gpu_direct_storage(torch.device("cuda"), tmp_path / "missing") != WORKS


@pytest.mark.parametrize("users", [None, "max_split_size_mb:64"])
def test_direct_storage_is_tried_with_the_memory_that_the_engine_uses(
    users: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots lie in segments that grow, into which not every driver reads."""
    seen: list[str | None] = []

    def run(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        seen.append(env.get("PYTORCH_CUDA_ALLOC_CONF"))
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(torch._C, "_gds_register_handle", lambda *_: None, raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if users is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", users)
    assert try_gpu_direct_storage(torch.device("cuda"), tmp_path) == WORKS
    assert seen == [users or "expandable_segments:True"]
