"""What a step on the CPU device really takes, by torch's memory profiler, against its plan."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME

import outcore

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.fixture(scope="module")
def memory() -> Any:
    """benchmarks/memory.py, which measures and compares."""
    found = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["memory_benchmark"] = module
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("family", "size", "seq_len", "activations", "is_packed", "most"),
    [
        pytest.param("llama", "small", 128, "recompute", False, 1.02, id="the loss"),
        pytest.param("llama", "few-words", 128, "recompute", False, 1.1, id="a block"),
        pytest.param("llama", "few-words", 128, "keep", False, 1.1, id="kept blocks"),
        pytest.param("llama", "tiny", 1024, "recompute", True, 1.1, id="a mask"),
        pytest.param("llama", "tiny", 1024, "keep", True, 1.02, id="kept masks"),
        pytest.param("gemma3", "tiny", 1024, "recompute", False, 1.15, id="the mask of a window"),
        pytest.param("gemma3", "tiny", 1024, "keep", False, 1.05, id="blocks that differ"),
        pytest.param("gpt2", "tiny", 512, "recompute", False, 1.2, id="scores, for dropout"),
        pytest.param("gpt2", "tiny", 512, "keep", True, 1.05, id="kept scores"),
    ],
)
def test_no_step_takes_more_than_its_plan(
    memory: Any,
    family: str,
    size: str,
    seq_len: int,
    activations: str,
    is_packed: bool,
    most: float,
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*recomputed instead of kept")
        row = memory.measure(
            family, size, 2048 // seq_len, seq_len, activations, is_packed=is_packed
        )
    assert row.measured <= row.predicted <= most * row.measured
    assert row.books <= row.measured


def test_tables_of_positions_are_not_booked_as_inputs() -> None:
    """Given for each sequence, positions make tables of the batch's shape, which blocks share."""
    model = outcore.offload(BY_NAME["llama"].make().train(), device="cpu", activations="recompute")
    outcore.AdamW(model, lr=1e-3)
    ids = torch.randint(0, 90, (4, 8))
    positions = torch.arange(8).repeat(4, 1)
    model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
    booked = outcore.engine_of(model).device_ledger.peaks()["block inputs"]
    num_inputs = model.config.num_hidden_layers + 1  # and the last norm's
    assert booked == num_inputs * ids.numel() * model.config.hidden_size * 4
    outcore.release(model)
