"""Warnings while a command runs: Outcore's own are lines, others look as Python shows them."""

import warnings
from pathlib import Path

import pytest

import outcore
from outcore.cli.warning_lines import warnings_told

OWN = str(Path(outcore.__file__).parent / "checkpoint" / "folder.py")


def test_own_warnings_are_lines_without_a_place() -> None:
    told: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        before = warnings.showwarning
        with warnings_told(told.append):
            warnings.warn_explicit("the copy waits", RuntimeWarning, OWN, 3)
            warnings.warn_explicit("not ours", UserWarning, "/elsewhere/torch/nn.py", 5)
        assert warnings.showwarning is before
    assert told == ["warning: the copy waits"]
    assert [(str(w.message), w.filename, w.lineno) for w in shown] == [
        ("not ours", "/elsewhere/torch/nn.py", 5)
    ]


def test_afterwards_warnings_are_as_before() -> None:
    told: list[str] = []
    before = warnings.showwarning
    with pytest.raises(ZeroDivisionError), warnings_told(told.append):
        _ = 1 / 0
    assert warnings.showwarning is before
