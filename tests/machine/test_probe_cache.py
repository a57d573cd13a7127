"""A report is kept per machine; what cannot be trusted is measured again."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.machine.probe import QUICK, ProbeReport, found_gpu_direct_storage, probe, run
from outcore.machine.probe.cache import cache_file, cache_folder, load_report, save_report
from outcore.machine.probe.facts import find_facts, fingerprint_of, probe_device
from outcore.machine.probe.sizes import full_sizes


@pytest.fixture
def measured(quick_report: ProbeReport, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measuring returns at once; the fingerprints that were measured."""
    asked: list[str] = []

    def measure(device: Any, sizes: Any, facts: Any, fingerprint: str, *_: Any) -> ProbeReport:
        asked.append(fingerprint)
        return replace(quick_report, facts=facts, fingerprint=fingerprint)

    monkeypatch.setattr(run, "_measure", measure)
    return asked


def test_the_second_probe_reads_the_first(measured: list[str], tmp_path: Path) -> None:
    first = probe(sizes=QUICK, cache_folder=tmp_path)
    second = probe(sizes=QUICK, cache_folder=tmp_path)
    assert len(measured) == 1
    assert second.device == first.device
    assert second.link == first.link


def test_free_memory_is_not_kept(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(sizes=QUICK, cache_folder=tmp_path)
    now = run.FreeMemory(device_bytes=123, host_bytes=456)
    monkeypatch.setattr(run, "free_memory", lambda _: now)
    machine = probe(sizes=QUICK, cache_folder=tmp_path).machine
    assert (machine.device_memory_bytes, machine.host_memory_bytes) == (123, 456)


def test_refresh_measures_again(measured: list[str], tmp_path: Path) -> None:
    probe(sizes=QUICK, cache_folder=tmp_path)
    probe(sizes=QUICK, cache_folder=tmp_path, refresh=True)
    assert len(measured) == 2


def test_a_disk_can_be_measured_again_alone(
    measured: list[str], quick_report: ProbeReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(quick_report.disk.path) if quick_report.disk else tmp_path
    first = probe(sizes=QUICK, disk=folder, cache_folder=tmp_path)
    assert first.disk is not None
    slower = replace(first.disk, both_ways_bytes_s=12.0, both_ways_seen_bytes_s=(11.0, 12.0, 30.0))
    monkeypatch.setattr(run, "measure_disk", lambda *_, **__: slower)
    assert probe(sizes=QUICK, disk=folder, cache_folder=tmp_path).disk != slower
    again = probe(sizes=QUICK, disk=folder, cache_folder=tmp_path, refresh_disk=True)
    assert again.machine.disk_both_ways_bytes_s == 12.0
    assert again.link == first.link
    assert sum("not equally fast: 0.00" in note for note in again.notes) == 1
    steady = replace(slower, both_ways_seen_bytes_s=(12.0,))
    monkeypatch.setattr(run, "measure_disk", lambda *_, **__: steady)
    again = probe(sizes=QUICK, disk=folder, cache_folder=tmp_path, refresh_disk=True)
    assert not any("equally fast" in note for note in again.notes)  # of what is no longer so
    with pytest.raises(ValueError, match="name it with disk="):
        probe(sizes=QUICK, cache_folder=tmp_path, refresh_disk=True)
    assert probe(sizes=QUICK, cache_folder=tmp_path).machine.disk_both_ways_bytes_s == 12.0
    assert len(measured) == 1


def test_another_disk_is_measured_alone(measured: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    first = probe(sizes=QUICK, cache_folder=tmp_path)
    steps: list[str] = []
    second = probe(
        sizes=QUICK, cache_folder=tmp_path, disk=other, progress=lambda name, *_: steps.append(name)
    )
    assert len(measured) == 1
    assert steps == ["disk"]
    assert second.disk is not None
    assert second.disk.path == str(other)
    assert second.device == first.device
    # And it is kept in turn.
    third = probe(sizes=QUICK, cache_folder=tmp_path, disk=other)
    assert third.disk is not None
    assert third.disk.read_bytes_s == second.disk.read_bytes_s


def test_a_disk_that_is_gone_is_left_out(measured: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    probe(sizes=QUICK, cache_folder=tmp_path, refresh=True)
    assert probe(sizes=QUICK, cache_folder=tmp_path, disk=other).disk is not None
    other.rmdir()
    assert probe(sizes=QUICK, cache_folder=tmp_path).disk is None


def _torn(text: str) -> str:
    return text[: len(text) // 2]


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        values = json.loads(text)
        change(values)
        return json.dumps(values)

    return apply


@pytest.mark.parametrize(
    "spoil",
    [
        _torn,
        lambda _: "",
        lambda _: "[1, 2, 3]",
        lambda _: "[" * 100_000,
        lambda text: text.replace("{", "\x00", 1),
        _changed(lambda values: values.update(format_version=999)),
        _changed(lambda values: values.update(fingerprint="0123456789abcdef")),
        _changed(lambda values: values.pop("link")),
        _changed(lambda values: values["link"].update(pieces=[])),
        _changed(lambda values: values["host"].update(read_bytes_s="fast")),
        _changed(lambda values: values["host"].update(read_bytes_s=-1.0)),
        _changed(lambda values: values["host"].update(read_bytes_s=0)),
        _changed(lambda values: values["host"].update(read_bytes_s=float("inf"))),
        _changed(lambda values: values["host"].update(num_threads=True)),
        _changed(lambda values: values["facts"].update(sharing="somehow")),
        _changed(lambda values: values["facts"].update(extra=1)),
    ],
)
def test_a_spoilt_file_is_measured_again(
    spoil: Callable[[str], str], measured: list[str], tmp_path: Path
) -> None:
    first = probe(sizes=QUICK, cache_folder=tmp_path)
    file = cache_file(first.fingerprint, tmp_path)
    file.write_text(spoil(file.read_text()))
    assert probe(sizes=QUICK, cache_folder=tmp_path).device == first.device
    assert len(measured) == 2
    assert load_report(first.fingerprint, tmp_path) is not None  # and it is whole again


def test_other_hardware_or_software_is_another_machine() -> None:
    facts = find_facts(probe_device())
    prints = {
        fingerprint_of(facts, QUICK),
        fingerprint_of(replace(facts, torch_version="9.9"), QUICK),
        fingerprint_of(replace(facts, driver="1.2"), QUICK),
        fingerprint_of(replace(facts, device_name="another"), QUICK),
        fingerprint_of(replace(facts, cpu_name="another"), QUICK),
        fingerprint_of(replace(facts, host_total_bytes=1), QUICK),
        fingerprint_of(facts, replace(QUICK, seconds=9.0)),
    }
    assert len(prints) == 7
    assert fingerprint_of(facts, QUICK) == fingerprint_of(find_facts(probe_device()), QUICK)


def test_a_change_of_the_machine_measures_again(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(sizes=QUICK, cache_folder=tmp_path)
    facts = find_facts(probe_device())
    monkeypatch.setattr(run, "find_facts", lambda _: replace(facts, driver="new"))
    probe(sizes=QUICK, cache_folder=tmp_path)
    assert len(set(measured)) == 2


def test_writing_leaves_one_file_and_no_other(quick_report: ProbeReport, tmp_path: Path) -> None:
    assert save_report(quick_report, tmp_path / "new" / "folder")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [
        f"machine-{quick_report.fingerprint}.json"
    ]


def test_a_folder_that_cannot_be_written_is_no_error(
    quick_report: ProbeReport, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert not save_report(quick_report, tmp_path / "file" / "folder")


def test_the_folder_follows_the_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "outcore"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "outcore"
    assert os.environ["HOME"] == str(tmp_path)


def test_direct_storage_counts_for_the_disk_that_it_was_tried_on(
    quick_report: ProbeReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    fingerprint = fingerprint_of(quick_report.facts, full_sizes("cuda"))
    monkeypatch.setattr(run, "find_facts", lambda _: quick_report.facts)
    assert quick_report.disk is not None

    def found(gpu_direct_storage: str, folder: Path, device: torch.device = cuda) -> bool:
        disk = replace(quick_report.disk, path=str(tmp_path))
        report = replace(
            quick_report,
            fingerprint=fingerprint,
            disk=disk,
            gpu_direct_storage=gpu_direct_storage,
        )
        assert save_report(report, tmp_path)
        return found_gpu_direct_storage(device, folder, cache_folder=tmp_path)

    assert not found_gpu_direct_storage(cuda, tmp_path, cache_folder=tmp_path), "nothing is kept"
    assert found("works", tmp_path)
    assert not found("the driver is not loaded", tmp_path)
    assert not found("works", tmp_path, torch.device("cpu"))
    assert not found("works", Path("/proc")), "another file system"
    assert not found("works", tmp_path / "missing")
