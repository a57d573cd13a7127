"""The command itself: fast help, version, and no torch before it is needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import outcore
from outcore.cli import app

ROOT = Path(__file__).parents[2]


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"outcore {outcore.__version__}"


def test_the_command_line_starts_without_torch() -> None:
    check = (
        "import sys, outcore.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("asked", [False, True])
def test_names_that_libraries_will_change_are_told_only_to_who_asks(asked: bool) -> None:
    program = (
        "import sys, warnings, outcore.cli as c; sys.argv = ['outcore', '--version']; "
        "c.app = lambda: warnings.warn('renamed', FutureWarning); c.main()"
    )
    options = ["-W", "default"] if asked else []
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert ("renamed" in done.stderr) is asked


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["train", "--help"],
        ["plan", "--help"],
        ["probe", "--help"],
        ["verify", "--help"],
        ["bench", "train", "--help"],
    ],
)
def test_help_shows_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    if len(command) > 1:
        assert f"outcore {' '.join(command[:-1])} " in result.stdout


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    "command", [[], ["train"], ["plan"], ["probe"], ["verify"], ["bench"], ["bench", "train"]]
)
def test_help_is_whole_where_it_is_narrow(
    command: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) == width
    assert not re.findall(r"^│ +--[\w-]*…", result.stdout, re.MULTILINE), "a name is cut off"


def test_every_public_name_can_be_had_and_no_other() -> None:
    for name in outcore.__all__:
        assert getattr(outcore, name) is not None
        assert name in dir(outcore)
    with pytest.raises(AttributeError, match="ofload"):
        outcore.ofload  # noqa: B018
