"""Buffers of the ring come back, each once, however an update ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.errors import LaneError
from outcore.optim import gradient_sinks
from outcore.optim.gradient_ring import GradientRing
from outcore.stream.lanes import Fence

CONFIG = GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=61, n_positions=16)
IDS = torch.arange(16).view(2, 8)


def make_ring(num_buffers: int = 2) -> GradientRing:
    return GradientRing(torch.zeros(4) for _ in range(num_buffers))


def failed_fence() -> Fence:
    fence = Fence()
    fence.error = RuntimeError("its reader failed")
    fence.mark_issued()
    return fence


def test_a_buffer_comes_back_once() -> None:
    ring = make_ring()
    loan = ring.loan()
    loan.take()
    assert ring.num_free == 1
    loan.give_back(None)
    loan.give_back(None)
    assert ring.num_free == 2
    first, second = ring.loan().take(), ring.loan().take()
    assert first.data_ptr() != second.data_ptr()


def test_an_update_that_fails_before_its_gradient_came_keeps_no_buffer() -> None:
    ring = make_ring()
    loan = ring.loan()
    loan.give_back(None)
    assert loan.take() is None
    assert ring.num_free == 2


def test_a_failed_reader_does_not_fail_the_next_gradient() -> None:
    ring = make_ring(1)
    loan = ring.loan()
    loan.take()
    loan.give_back(failed_fence())
    assert ring.loan().take() is not None


def passing(**options: Any) -> tuple[Any, outcore.AdamW, GradientRing]:
    model = outcore.offload(GPT2LMHeadModel(CONFIG).train(), device="cpu", **options)
    optimizer = outcore.AdamW(model, lr=1e-3, update_during_backward=True)
    sink = outcore.engine_of(model).backend._passing
    assert sink is not None
    return model, optimizer, sink._ring


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def assert_all_come_back(ring: GradientRing, *, on_disk: bool = False) -> None:
    num_buffers = gradient_sinks.num_ring_buffers(1, on_disk=on_disk)
    deadline = time.monotonic() + 5
    while ring.num_free < num_buffers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ring.num_free == num_buffers


def test_an_update_that_is_refused_borrows_nothing() -> None:
    model, optimizer, ring = passing()
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    with pytest.raises(ValueError, match="beta2"):
        loss_of(model).backward()
    time.sleep(0.1)  # in which a copy would take a buffer
    assert_all_come_back(ring)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    loss_of(model).backward()
    optimizer.step()
    outcore.synchronize(model)
    assert_all_come_back(ring)


@pytest.mark.parametrize("disk", [False, True])
def test_a_backward_whose_updates_fail_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    """Each of more chunks than there are buffers fails before its gradient is on the host."""
    monkeypatch.setattr(gradient_sinks, "RING_BUFFERS", 2)
    monkeypatch.setattr(gradient_sinks, "DISK_RING_BUFFERS", (2, 2))
    options = {"weights": "disk", "state": "disk", "disk": str(tmp_path)} if disk else {}
    model, _, ring = passing(**options)
    backend, error = outcore.engine_of(model).backend, RuntimeError("the updater has ended")
    if disk:
        monkeypatch.setattr("outcore.optim.disk_updater.DiskUpdater._stage", _raising(error))
    updaters = backend._updaters
    assert updaters is not None
    assert updaters._queue is not None
    updaters._queue.break_off(error)
    backward = threading.Thread(target=loss_of(model).backward, daemon=True)
    backward.start()
    backward.join(20)
    assert not backward.is_alive(), "the backward waits for a buffer that nobody gives back"
    assert_all_come_back(ring)
    with pytest.raises(LaneError, match="the updater has ended"):
        loss_of(model)


def _raising(error: Exception) -> Any:
    def call(*_: Any) -> None:
        raise error

    return call
