"""The cache of the Hugging Face Hub as a download leaves it, made by hand; no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def offline_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make ``folder`` the cache, and let nothing be fetched."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def put_snapshot(cache: Path, name: str) -> Path:
    """Return the folder for the files of ``name``; ``link_snapshot`` shows them afterwards."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    return folder / "blobs"


def link_snapshot(blobs: Path) -> Path:
    """Link every file from the snapshot, and return that."""
    snapshot = blobs.parent / "snapshots" / COMMIT
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def remembered_download(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a snapshot will be asked for with; it is not fetched."""
    asked: dict[str, Any] = {}

    def remember(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", remember)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return asked
