"""`outcore probe`: what it prints, writes and returns."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from outcore.cli import app
from outcore.machine import Machine, catalogue_names
from outcore.machine.probe import QUICK, ProbeReport, run

ROOT = Path(__file__).parents[2]


def run_probe(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["probe", *arguments])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(run, "full_sizes", lambda _: QUICK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "probe-cache"))


def test_the_table_and_the_kept_report(tmp_path: Path) -> None:
    result = run_probe("--disk", str(tmp_path), "--refresh")
    assert result.exit_code == 0, result.output
    for line in ("measuring link (2 of 5)", "both at once", "host AdamW", "disk read"):
        assert line in result.stdout
    if not torch.cuda.is_available():
        assert "no GPU: the CPU is the device" in result.stdout
    again = run_probe("--disk", str(tmp_path))
    assert again.exit_code == 0
    assert "measuring" not in again.stdout
    assert list(tmp_path.iterdir()) == []


def test_json_on_stdout_is_the_report_and_nothing_else() -> None:
    result = run_probe("--json", "-")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert "both at once" in result.stderr
    report = ProbeReport.from_dict(values)
    assert values["machine"]["matmul_flops_s"] == report.device.matmul_flops_s
    assert set(values["machine"]) == {field.name for field in fields(Machine)}
    assert set(values) == {
        "format_version",
        "fingerprint",
        "when",
        "seconds",
        "facts",
        "free",
        "link",
        "host",
        "disk",
        "device",
        "gpu_direct_storage",
        "notes",
        "machine",
    }


def test_json_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    result = run_probe("--json", str(file))
    assert result.exit_code == 0, result.output
    ProbeReport.from_dict(json.loads(file.read_text()))


def test_the_list_shows_every_machine() -> None:
    result = run_probe("--list")
    assert result.exit_code == 0, result.output
    for name in catalogue_names():
        assert name in result.stdout
    values = json.loads(run_probe("--list", "--json", "-").stdout)
    assert [machine["name"] for machine in values["machines"]] == list(catalogue_names())
    assert all(machine["sources"] for machine in values["machines"])


def test_the_list_needs_no_torch() -> None:
    check = (
        "import sys; from typer.testing import CliRunner; from outcore.cli import app; "
        "r = CliRunner().invoke(app, ['probe', '--list']); "
        "sys.exit(r.exit_code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--disk", "/no/such/place"], "/no/such/place is no directory"),
        (["--disk", ""], "--disk: an empty name is no directory"),
        (["--list", "--disk", "/tmp"], "--list: measures nothing"),
        (["--list", "--refresh"], "--list: measures nothing"),
        (["--json", "/no/such/place/x.json"], "/no/such/place is no directory"),
    ],
)
def test_mistakes_get_an_answer_and_status_2(arguments: list[str], message: str) -> None:
    result = run_probe(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(word for word in result.output.split() if word != "│")


def test_a_disk_that_is_full_is_status_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from outcore.machine.probe import disk

    monkeypatch.setattr(disk, "free_disk_bytes", lambda _: 0)
    result = run_probe("--disk", str(tmp_path), "--refresh")
    assert result.exit_code == 2
    assert "0 B are free" in result.output


def test_a_file_that_cannot_be_written_is_told_before_and_after(tmp_path: Path) -> None:
    result = run_probe("--list", "--json", "/proc/x.json")
    assert result.exit_code == 2
    assert "--json: /proc/x.json cannot be written: No such file" in result.output
    result = run_probe("--list", "--json", "/dev/full")
    assert result.exit_code == 2
    assert "/dev/full cannot be written: No space left on device" in result.stderr
