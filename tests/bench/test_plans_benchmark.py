"""benchmarks/plans.py keeps the rows that it has, whatever becomes of the next thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script

from outcore.bench.job import BenchFailure
from outcore.errors import StoreError

plans = script("plans")
KILLED = BenchFailure(name="outcore", failed="did not finish within 400 s")


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run a row that is killed while its scratch files are there; return what was written."""
    monkeypatch.setattr(plans, "has_library", lambda: True)
    monkeypatch.setattr(plans, "disk_now", lambda _: Figures())
    monkeypatch.setattr(plans, "asdict", vars)

    def killed(*_: Any, **__: Any) -> BenchFailure:
        scratch = tmp_path / "outcore-scratch-1-01234567"
        scratch.mkdir()
        (scratch / "lock").touch()
        return KILLED

    monkeypatch.setattr(plans, "run_peer", killed)
    file = tmp_path / "plans.json"
    words = ["plans.py", "--json", str(file), "--disk", str(tmp_path), "--only", "72b-minimal-clip"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises((SystemExit, StoreError)):
        plans.main()
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


class Figures:
    def __init__(self) -> None:
        self.both_ways_bytes_s = 1e9


def test_the_disk_is_measured_without_what_a_killed_row_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Path] = []

    def measured(folder: Path, *_: Any, **__: Any) -> Figures:
        left.extend(folder.glob("outcore-scratch-*"))
        return Figures()

    monkeypatch.setattr(plans, "measure_disk", measured)
    (row,) = run(tmp_path, monkeypatch)
    assert left == []
    assert row["failed"] == KILLED.failed
    assert row["disk"]["after"] == {"both_ways_bytes_s": 1e9}


def test_a_row_is_written_before_the_disk_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Figures:
        raise StoreError("60 MiB are free, and measuring the disk takes 256 MiB")

    monkeypatch.setattr(plans, "measure_disk", full)
    (row,) = run(tmp_path, monkeypatch)
    assert row["failed"] == KILLED.failed
