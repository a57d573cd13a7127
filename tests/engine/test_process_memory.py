"""The process as a whole: what it may grow to on a CPU, and that blocks keep it there."""

from __future__ import annotations

from typing import Any

import pytest
from families import BY_NAME, batch_of, offloaded
from training import with_optimizer

import outcore
from outcore.engine import offload
from outcore.store import heap

LLAMA = BY_NAME["llama"]
GIB = 1 << 30


@pytest.mark.parametrize(
    ("budgets", "most"),
    [
        ({}, int(8 * GIB * offload.HOST_SHARE)),
        ({"host_memory": "2GiB"}, 2 * GIB),
        ({"host_memory": "2GiB", "device_memory": "1GiB"}, 3 * GIB),
        ({"device_memory": "1GiB"}, int(8 * GIB * offload.HOST_SHARE)),
        ({"host_memory": "7.9GiB", "device_memory": "1GiB"}, int(8 * GIB * offload.HOST_SHARE)),
    ],
)
def test_a_process_may_grow_by_its_budgets(
    budgets: dict[str, str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "available_host_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(offload, "anonymous_bytes", lambda: 100)
    limits: list[Any] = []
    monkeypatch.setattr(offload, "Heap", lambda limit: limits.append(limit) or heap.Heap(limit))
    outcore.offload(LLAMA.make(), device="cpu", **budgets)
    assert limits == [100 + most]


def test_holes_are_given_back_after_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(heap, "_trim", lambda: trims.append)
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    num_blocks = model.config.num_hidden_layers

    def step() -> int:
        before = len(trims)
        model(**batch_of(LLAMA)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(trims) - before

    assert step() == 0
    monkeypatch.setattr(heap, "anonymous_bytes", lambda: 1 << 60)
    assert step() >= 2 * num_blocks  # forward and backward
