"""State that lodges on the device or visits it: homes that stay true, gradients at odd moments."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from everything import differing, everything
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.optim.gradient_sinks import RING_BUFFERS
from outcore.optim.lodgers import Lodgers, fitting_lodgers
from outcore.stream.lanes import injected_delays


def make_model(num_layers: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    model = LlamaForCausalLM(config).train()
    return outcore.offload(model, device="cpu", activations="recompute", **options)


def loss_of(model: Any, seed: int) -> Tensor:
    ids = torch.randint(0, 97, (4, 8), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def lodgers_of(model: Any) -> Lodgers:
    updaters = outcore.engine_of(model).backend._updaters
    assert updaters is not None
    state = updaters.device_state
    assert state is not None
    assert state.lodgers is not None
    return state.lodgers


@pytest.fixture
def late_lodgers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lodgers whose updates begin late, while the list holds True."""
    is_late = [False]
    original = Lodgers.update

    def update(self: Lodgers, update: Any) -> None:
        if is_late[0]:
            self._lane.submit(lambda: time.sleep(0.1))
        original(self, update)

    monkeypatch.setattr(Lodgers, "update", update)
    return is_late


@pytest.mark.parametrize("passing", [False, True])
def test_lodged_chunks_are_updated_at_every_step(passing: bool) -> None:
    model = make_model(num_layers=12, num_visits=8)
    optimizer = outcore.AdamW(model, lr=1e-3, update_during_backward=passing)
    counts = []
    with injected_delays(0.002, seed=1):
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(outcore.engine_of(model).backend.num_updated["lodged"])
    lodged = outcore.engine_of(model).backend.chunks[:6]  # eight, less the two that help the host
    first = 1 if passing else 0  # passing, the first step's updates come before its peak is known
    assert counts == [max(0, i + 1 - first) * sum(c.numel for c in lodged) for i in range(5)]
    outcore.release(model)


@pytest.mark.parametrize("weights", ["host", "device"])
def test_homes_are_true_whenever_they_are_read(weights: str) -> None:
    def run(num_visits: int, reads: bool) -> dict[str, Tensor]:
        model = make_model(num_visits=num_visits, weights=weights)
        optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
        for step in range(6):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if reads:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 3:
                outcore.synchronize(model)
                with torch.no_grad():
                    model.model.embed_tokens.weight.mul_(1.5)
                    model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
        found = everything(model, optimizer)
        outcore.release(model)
        return found

    on_host = run(0, reads=False)
    assert differing(on_host, run(9, reads=False)) == []
    assert differing(on_host, run(9, reads=True)) == []


def test_what_is_loaded_replaces_what_lodges() -> None:
    model = make_model(num_visits=9)
    optimizer = outcore.AdamW(model, lr=1e-3)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    empty = optimizer.state_dict()
    for entry in empty["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = torch.zeros_like(entry[name])
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(empty)
    optimizer.synchronize()
    assert all(
        not bool(entry["exp_avg"].any()) for entry in optimizer.state_dict()["state"].values()
    )
    outcore.release(model)


def test_release_brings_lodged_weights_home() -> None:
    def run(num_visits: int) -> dict[str, Tensor]:
        model = make_model(num_visits=num_visits)
        optimizer = outcore.AdamW(model, lr=1e-3)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        outcore.release(model)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert differing(run(0), run(9)) == []


@pytest.mark.parametrize("passing", [False, True])
def test_a_gradient_for_the_next_step_waits_for_this_one(
    passing: bool, late_lodgers: list[bool]
) -> None:
    def run(is_late: bool) -> dict[str, Tensor]:
        model = make_model(num_visits=30)
        optimizer = outcore.AdamW(model, lr=1e-3, update_during_backward=passing)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        # A second graph through the embedding, made before the step and used after it.
        second = model.model.embed_tokens(torch.tensor([[1, 2, 3]])).sum() * 3
        loss = loss_of(model, 5)
        late_lodgers[0] = is_late
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
        late_lodgers[0] = False
        found = everything(model, optimizer)
        outcore.release(model)
        return found

    assert differing(run(False), run(True)) == []


def test_refused_gradients_change_nothing_and_lose_no_buffer(late_lodgers: list[bool]) -> None:
    def run(num_refused: int) -> dict[str, Tensor]:
        model = make_model(num_visits=6)
        optimizer = outcore.AdamW(model, lr=1e-3, update_during_backward=True)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.synchronize()
        late_lodgers[0] = True
        loss_of(model, 5).backward()
        for _ in range(num_refused):
            with pytest.raises(RuntimeError, match="second gradient"):
                (model.model.embed_tokens.weight * 3).sum().backward()
        late_lodgers[0] = False
        optimizer.step()
        optimizer.synchronize()
        loss_of(model, 6).backward()  # would wait for ever if the ring had lost its buffers
        optimizer.step()
        found = everything(model, optimizer)
        outcore.release(model)
        return found

    plain, refused = run(0), run(RING_BUFFERS + 1)
    assert differing(plain, refused) == []


@pytest.mark.timeout(30)
def test_an_update_that_fails_in_step_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(state=["device", "host", "host", "host"])
    optimizer = outcore.AdamW(model, lr=1e-2)
    loss_of(model, 0).backward()

    def fail(update: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(outcore.engine_of(model).backend._updaters, "_update_on_device", fail)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    with pytest.raises(outcore.LaneError, match="no room"):
        outcore.synchronize(model)
    with pytest.raises(outcore.LaneError, match="no room"):
        loss_of(model, 0)


def test_state_that_finds_no_room_on_the_device_leaves_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    def run(**options: Any) -> dict[str, Tensor]:
        model = make_model(**options)
        optimizer = outcore.AdamW(model, lr=1e-2)
        with injected_delays(0.005, seed=0):
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = everything(model, optimizer)
        taken = outcore.engine_of(model).device_ledger._taken
        assert not taken.get("lodged state")
        assert "outcore-lodged-state" not in {thread.name for thread in threading.enumerate()}
        outcore.release(model)
        return found

    expected = run(num_visits=0)
    monkeypatch.setattr("outcore.optim.device_state.Visitor", no_room)
    assert not differing(run(num_visits=4), expected)


@pytest.mark.parametrize(
    ("room", "unwanted", "expected"),
    [
        (100, 100, 6),  # all
        (100, 45, 4),  # what nobody else wants
        (100, -50, 2),  # urgent ones only
        (15, -50, 1),
        (9, 9, 0),
    ],
)
def test_urgent_chunks_lodge_first_and_others_where_nobody_wants_the_room(
    room: int, unwanted: int, expected: int
) -> None:
    found = fitting_lodgers([10] * 6, num_urgent=2, room_bytes=room, unwanted_bytes=unwanted)
    assert found == expected


def test_without_urgent_chunks_one_may_lodge_in_the_room_there_is() -> None:
    assert fitting_lodgers([10] * 6, num_urgent=0, room_bytes=50, unwanted_bytes=0) == 1
