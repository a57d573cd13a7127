"""The disk budget: PATH:SIZE, or what is free less a margin."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.errors import OutOfBudget
from outcore.store import disk_calls
from outcore.store.disk_budget import DiskBudget, disk_ledger, parse_disk

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "path", "num_bytes"),
    [
        ("/mnt/nvme:500GiB", "/mnt/nvme", 500 * GIB),
        ("/mnt/nvme", "/mnt/nvme", None),
        ("scratch:1.5GB", "scratch", 1_500_000_000),
        (".", ".", None),
        ("/mnt/a:b:2GiB", "/mnt/a:b", 2 * GIB),
        ("/mnt/a:b/c", "/mnt/a:b/c", None),
        ("/mnt/with space: 2 GiB", "/mnt/with space", 2 * GIB),
        ("~/scratch", str(Path.home() / "scratch"), None),
    ],
)
def test_what_people_write(text: str, path: str, num_bytes: int | None) -> None:
    assert parse_disk(text) == DiskBudget(path=Path(path), num_bytes=num_bytes)


@pytest.mark.parametrize("text", ["", " ", ":5GiB", "/mnt:", "/mnt:5GX", "/mnt:0", "/mnt:-1"])
def test_what_makes_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="disk"):
        parse_disk(text)


def test_a_given_size_is_the_budget(tmp_path: Path) -> None:
    ledger = disk_ledger(DiskBudget(path=tmp_path, num_bytes=1000))
    assert (ledger.tier, ledger.budget_bytes) == ("disk", 1000)
    with pytest.raises(OutOfBudget, match="disk space: state needs 1001 B"):
        ledger.take("state", 1001)


@pytest.mark.parametrize(
    ("free_bytes", "budget_bytes"), [(10 * GIB, 9 * GIB), (1000 * GIB, 980 * GIB)]
)
def test_without_a_size_a_margin_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, budget_bytes: int
) -> None:
    monkeypatch.setattr(disk_calls, "free_bytes", lambda _: free_bytes)
    assert disk_ledger(DiskBudget(path=tmp_path, num_bytes=None)).budget_bytes == budget_bytes


def test_no_room_and_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="No such file"):
        disk_ledger(DiskBudget(path=tmp_path / "unmounted", num_bytes=None))
    monkeypatch.setattr(disk_calls, "free_bytes", lambda _: GIB // 2)
    with pytest.raises(ValueError, match=r"512\.0 MiB are free.*1\.0 GiB are left"):
        disk_ledger(DiskBudget(path=tmp_path, num_bytes=None))
