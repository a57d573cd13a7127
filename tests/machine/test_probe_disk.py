"""The disk: real figures, helpful refusals, and never a file left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outcore.errors import StoreError
from outcore.machine.probe import QUICK, disk, probe, run
from outcore.machine.probe.disk import (
    DiskMeasurement,
    default_scratch,
    file_system_of,
    lasting_rate,
    measure_disk,
)
from outcore.machine.probe.report import DiskFigures

ROOT = Path(__file__).parents[2]

# Writes for half a minute, and says when it has begun.
ENDLESS = """
import sys
from dataclasses import replace
from pathlib import Path
from outcore.machine.probe import QUICK, disk

def write(file, buffer, offset):
    print("writing", flush=True)
    import time
    time.sleep(0.05)
    return len(buffer)

disk._write = write
disk.measure_disk(Path(sys.argv[1]), replace(QUICK, disk_s=30.0, disk_bytes=2**31))
"""


def test_a_disk_is_read_and_written(tmp_path: Path) -> None:
    figures = measure_disk(tmp_path, QUICK)
    assert figures.path == str(tmp_path.resolve())
    assert figures.read_bytes_s > 1e6
    assert figures.write_bytes_s > 1e6
    assert figures.both_ways_bytes_s > 1e6
    assert figures.free_bytes > 0
    assert figures.file_system == file_system_of(tmp_path) != "unknown"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")
def test_memory_is_reported_as_such() -> None:
    figures = measure_disk(Path("/dev/shm"), QUICK)
    assert figures.is_memory
    assert not figures.is_direct
    assert figures.file_system == "tmpfs"


def test_a_disk_in_memory_takes_no_more_than_a_fourth_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a container can be larger than all that its processes may have."""
    offsets: set[int] = set()

    def write(file: int, buffer: memoryview, offset: int) -> int:
        offsets.add(offset)
        return os.pwritev(file, [buffer], offset)

    monkeypatch.setattr(disk, "_write", write)
    monkeypatch.setattr(disk, "available_host_bytes", lambda: 8 << 20)
    monkeypatch.setattr(disk, "file_system_of", lambda _: "tmpfs")
    measure_disk(tmp_path, QUICK)
    assert offsets == {0, 1 << 20}
    monkeypatch.setattr(disk, "available_host_bytes", lambda: 3 << 20)
    with pytest.raises(StoreError, match=r"3\.0 MiB are free"):
        measure_disk(tmp_path, QUICK)
    monkeypatch.setattr(disk, "file_system_of", lambda _: "ext4")
    offsets.clear()
    measure_disk(tmp_path, QUICK)
    assert len(offsets) > 2


def test_without_direct_access_it_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(disk.os, "open", refuse_direct)
    figures = measure_disk(tmp_path, QUICK)
    assert not figures.is_direct
    assert figures.read_bytes_s > 1e6
    assert list(tmp_path.iterdir()) == []


def test_what_lasts_counts_and_not_the_first_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []

    def fast_then_slow(file: int, buffer: memoryview, offset: int) -> int:
        begun.append(time.perf_counter())
        time.sleep(0.001 if begun[-1] - begun[0] < 0.2 else 0.02)
        return os.preadv(file, [buffer], offset)

    monkeypatch.setattr(disk, "_read", fast_then_slow)
    figures = measure_disk(tmp_path, replace(QUICK, disk_s=0.6))
    at_most = disk._NUM_THREADS * QUICK.disk_block_bytes / 0.02
    assert 0.3 * at_most < figures.read_bytes_s <= 1.05 * at_most


def test_a_file_that_is_read_sooner_than_time_is_up_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    memory: set[int] = set()

    def read(file: int, buffer: memoryview, offset: int) -> int:
        offsets.append(offset)
        memory.add(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
        return os.preadv(file, [buffer], offset)

    monkeypatch.setattr(disk, "_read", read)
    measure_disk(tmp_path, replace(QUICK, disk_bytes=2 << 20, disk_s=0.5))
    assert set(offsets) == {0, 1 << 20}
    assert len(memory) == QUICK.disk_memory_bytes // QUICK.disk_block_bytes  # not one hot buffer


@pytest.mark.parametrize(
    ("done_s", "end_s", "rate"),
    [
        ([0.01 * i for i in range(1, 401)], 4.0, 100.0),
        ([0.001 * i for i in range(1, 2000)] + [2.0 + 0.1 * i for i in range(21)], 4.0, 10.0),
        ([3.0, 3.1, 3.2], 4.0, 0.75),  # too few to tell what lasts
        ([2.0] * 8 + [4.0] * 8, 4.0, 4.0),  # eight at a time: not fifteen in two seconds
        ([1.0] * 8 + [2.0] * 8 + [3.0] * 8 + [4.0] * 8, 4.0, 8.0),
        ([0.01 * i for i in range(1, 401)], 6.0, 100 / 3),  # the last are there when it is synced
        ([], 4.0, 0.0),
    ],
)
def test_a_lasting_rate_is_that_of_the_second_half(
    done_s: list[float], end_s: float, rate: float
) -> None:
    assert lasting_rate(done_s, end_s) == pytest.approx(rate, rel=0.02)
    assert lasting_rate(done_s[::-1], end_s) == lasting_rate(done_s, end_s)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_file_is_left_however_it_ends(how: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("writing")
        process.send_signal(how)
        start = time.monotonic()
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert time.monotonic() - start < 10  # the threads did not go on to the end
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_disk_bytes", lambda _: 3 << 20)
    with pytest.raises(StoreError, match=r"3\.0 MiB are free.*takes 4\.0 MiB; --disk"):
        measure_disk(tmp_path, QUICK)


def test_errors_of_the_disk_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_write", full)
    with pytest.raises(StoreError, match=f"{tmp_path}: No space left"):
        measure_disk(tmp_path, QUICK)
    assert list(tmp_path.iterdir()) == []


def test_a_default_disk_that_fails_is_only_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_disk_bytes", lambda _: 0)
    report = probe(sizes=QUICK, cache_folder=tmp_path)
    assert report.disk is None
    assert any("disk was not measured" in note for note in report.notes)
    assert report.machine.disk_bytes == 0
    with pytest.raises(StoreError):
        probe(sizes=QUICK, cache_folder=tmp_path, disk=tmp_path)


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_disk_that_fails_at_a_later_look(
    is_asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a default one it is noted, like a failure at first."""
    look, num_looks = DiskMeasurement.look, 0

    def twice(self: DiskMeasurement) -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks > 2:
            raise StoreError(f"{tmp_path}: Input/output error")
        look(self)

    monkeypatch.setattr(DiskMeasurement, "look", twice)
    monkeypatch.setattr(run, "default_scratch", lambda: tmp_path)
    cache = tmp_path / "cache"
    if is_asked_for:
        with pytest.raises(StoreError, match="Input/output error"):
            probe(sizes=QUICK, cache_folder=cache, disk=tmp_path)
    else:
        report = probe(sizes=QUICK, cache_folder=cache)
        assert report.disk is None
        assert any("Input/output error" in note for note in report.notes)
    assert [path for path in tmp_path.iterdir() if path != cache] == []


def test_the_median_of_several_looks_counts_and_differences_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared disk goes up and down: one slow look is not the disk."""
    rates = {disk._write: iter([2e9]), disk._read: iter([3e9])}
    rates[disk._read_and_write] = iter([1.0e9, 1.6e9, 1.7e9, 1.5e9])
    seen: list[float] = []

    def told(self: Any, operation: Any, *, times_as_long: float = 1.0) -> float:
        seen.append(next(rates[operation]))
        return seen[-1]

    monkeypatch.setattr(disk._FileBlocks, "run", told)
    between: list[str] = []
    for name in ("measure_link", "measure_host", "measure_device"):
        measure = getattr(run, name)

        def noted(*arguments: Any, name: str = name, measure: Any = measure, **named: Any) -> Any:
            between.append(f"{name} after {len(seen)}")
            return measure(*arguments, **named)

        monkeypatch.setattr(run, name, noted)
    report = probe(sizes=QUICK, disk=tmp_path, cache_folder=tmp_path)
    assert between == ["measure_link after 3", "measure_host after 4", "measure_device after 5"]
    assert report.disk is not None
    assert report.disk.both_ways_seen_bytes_s == (1.0e9, 1.6e9, 1.7e9, 1.5e9)
    assert report.machine.disk_both_ways_bytes_s == pytest.approx(1.55e9)
    assert any("1.00 to 1.70 GB/s each way" in note for note in report.notes)


def test_a_steady_disk_needs_no_note() -> None:
    figures = DiskFigures(
        path="/mnt",
        file_system="ext4",
        free_bytes=1,
        read_bytes_s=3e9,
        write_bytes_s=2e9,
        both_ways_bytes_s=1.5e9,
        both_ways_seen_bytes_s=(1.4e9, 1.5e9, 1.6e9),
        is_direct=True,
        is_memory=False,
    )
    assert run.notes_on(figures) == []


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory"):
        probe(sizes=QUICK, disk=tmp_path / "missing")


def test_the_default_is_a_folder_that_can_be_written() -> None:
    assert os.access(default_scratch(), os.W_OK)
