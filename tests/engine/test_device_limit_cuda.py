"""The budget on a real GPU: what asks for more is refused, and it goes with its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME, LR, batch_of

import outcore

pytestmark = pytest.mark.gpu

MIB = 2**20
HOMES: dict[str, Any] = {"weights": "host", "state": "host", "compile": False}


def _takes(mib: int) -> bool:
    """Whether the process can have as much more of the GPU."""
    torch.cuda.empty_cache()
    try:
        torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def _offloaded(mib: int | None) -> Any:
    family = BY_NAME["llama"]
    budget = None if mib is None else f"{mib}MiB"
    model = outcore.offload(family.make(), device="cuda", device_memory=budget, **HOMES)
    optimizer = outcore.AdamW(model, lr=LR, max_grad_norm=1.0)
    batch = {name: tensor.cuda() for name, tensor in batch_of(family).items()}
    model(**batch).loss.backward()
    optimizer.step()
    outcore.synchronize(model)
    return model


def test_the_limit_of_a_model_goes_with_it() -> None:
    assert _takes(1024)
    first = _offloaded(768)
    assert _takes(512)
    assert not _takes(1024)
    second = _offloaded(384)
    assert not _takes(512)
    outcore.release(second)
    assert _takes(512)  # the first has its own again
    assert not _takes(1024)
    del first, second  # nobody released the first: it goes with its last name
    third = _offloaded(None)
    assert _takes(1024)
    outcore.release(third)
    assert _takes(1024)


def test_an_offload_that_fails_leaves_no_limit() -> None:
    with pytest.raises(outcore.OutcoreError, match="device"):
        outcore.offload(BY_NAME["llama"].make(), device="cuda", device_memory="1KiB", **HOMES)
    assert _takes(1024)
