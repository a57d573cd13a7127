"""Files for runs, and a machine that need not be measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade_plans import make_machine
from train_files import Files, write_chats, write_model

from outcore.train import subject


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_model(folder / "model")
    write_chats(folder / "chats.jsonl")
    return folder


@pytest.fixture
def files(
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_torch_thread: None,
    closed_engines: None,
) -> Files:
    machine = make_machine(device_name="CPU", name="here", is_unified=True)
    monkeypatch.setattr(subject, "here", lambda **_: machine)
    return Files(folder=tmp_path, model=prepared / "model", data=prepared / "chats.jsonl")
