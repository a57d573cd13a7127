"""What a run is planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from handmade_plans import make_machine

from outcore.shapes import shape_config
from outcore.train import subject
from outcore.train.settings import TrainSettings


def test_the_disk_that_was_named_is_the_one_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path | None] = []

    def here(*, disk: Path | None, progress: Any) -> Any:
        asked.append(disk)
        return make_machine(device_name="CPU", name="here", is_unified=True)

    monkeypatch.setattr(subject, "here", here)
    for disk in (f"{tmp_path}:10GiB", None):
        settings = TrainSettings(model="m", data=("d",), output="o", seq_len=128, disk=disk)
        subject.plan_for(settings, 1, shape_config("smollm2-135m"))
    assert asked == [tmp_path, None]
