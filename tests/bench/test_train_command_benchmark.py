"""benchmarks/train_command.py has a figure of a run that took all of its steps, or none."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import script

script("loading")  # which it imports
train_command = script("train_command")

RUN = """
import json, pathlib, sys
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
output.mkdir()
print("model in its homes after 1.5 s")
with (output / "metrics.jsonl").open("w") as file:
    for step in range(1, {taken} + 1):
        figures = {{"step_s": 2.0, "tflops": 1.0, "data_wait_s": 0.0}}
        file.write(json.dumps({{"kind": "train", "step": step, **figures}}) + "\\n")
        file.flush()
        print(f"step {{step}}/12  loss 1.0", flush=True)
sys.exit("CUDA error")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(train_command, "write_tokenizer", lambda *_: None)

    def train(taken: int) -> Any:
        program = tmp_path / "program"
        program.write_text(f"#!{sys.executable}\n{RUN.format(taken=taken)}")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        arguments = argparse.Namespace(
            data=tmp_path, checkpoint=None, shape="", steps=12, seq_len=4, sequences=1
        )
        return train_command.run_command(arguments, tmp_path)

    return train


def test_steps_are_counted_from_the_fifth_on(run: Any) -> None:
    figures = run(12)
    assert json.dumps(figures)
    assert figures["step_s"] == 2.0
    assert figures["load_s"] == 1.5


def test_a_run_that_ends_early_is_none(run: Any) -> None:
    with pytest.raises(SystemExit, match="ended early, with status 1"):
        run(8)
