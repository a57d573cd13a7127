"""`outcore train` in a process of its own, on a machine that need not be measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from handmade_plans import make_machine
from outcore.train import subject
machine = make_machine(**{facts!r})
subject.here = lambda **_: machine
from outcore.cli import main
main()
"""
FACTS: dict[str, dict[str, Any]] = {
    "cpu": {"device_name": "CPU", "name": "here", "is_unified": True},
    "cuda": {"name": "here"},
}


def started(
    device: str, arguments: list[str], output: Any = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    script = SCRIPT.format(tests=str(root / "tests"), facts=FACTS[device])
    return subprocess.Popen(
        [sys.executable, "-c", script, "train", "--device", device, *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": _path(root), "COLUMNS": "200", **environment},
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if text in line:
            return
    pytest.fail(f"{text!r} never came:\n{''.join(told)}")


def _path(root: Path) -> str:
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
