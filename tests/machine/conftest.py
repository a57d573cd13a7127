from pathlib import Path

import pytest

from outcore.machine.probe import QUICK, ProbeReport, probe


@pytest.fixture(scope="session")
def quick_report(tmp_path_factory: pytest.TempPathFactory) -> ProbeReport:
    """This machine, measured once with small sizes."""
    return probe(
        sizes=QUICK,
        disk=tmp_path_factory.mktemp("disk"),
        cache_folder=tmp_path_factory.mktemp("cache"),
    )


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that no test reads or writes the user's own report."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
