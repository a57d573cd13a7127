"""The visitor beside the host: what it stages, and gradients that come at an awkward moment."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.optim.gradient_sinks import RING_BUFFERS
from outcore.optim.visitor import Visitor
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


def visitor_of(model: Any) -> Visitor:
    visitor = outcore.engine_of(model).backend._visitor
    assert visitor is not None
    return visitor


def wait_until_staged(model: Any) -> int:
    """Wait until the visitor holds as many chunks as it may, and return how many."""
    visitor = visitor_of(model)
    deadline = time.monotonic() + 10
    while visitor._can_stage() and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(visitor._staged)


@pytest.fixture
def late_visitor(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A visitor that begins each update late, while the list holds True."""
    is_late = [False]
    original = Visitor._conduct

    def conduct(self: Visitor, update: Any) -> None:
        if is_late[0]:
            time.sleep(0.1)
        original(self, update)

    monkeypatch.setattr(Visitor, "_conduct", conduct)
    return is_late


@pytest.mark.parametrize("passing", [False, True])
def test_chunks_are_staged_before_every_step(passing: bool) -> None:
    model = make_model(num_layers=12, num_visits=8)
    optimizer = outcore.AdamW(model, lr=1e-3, update_during_backward=passing)
    with injected_delays(0.002, seed=1):
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            assert wait_until_staged(model) == 6  # eight, less the two that help the host
    outcore.release(model)


def test_a_gradient_for_the_next_step_waits_for_this_one(late_visitor: list[bool]) -> None:
    def run(is_late: bool) -> dict[str, Tensor]:
        model = make_model(num_visits=30)
        optimizer = outcore.AdamW(model, lr=1e-3)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
        wait_until_staged(model)
        loss_of(model, 5).backward()
        # A second graph through the embedding, made before the step and used after it.
        second = model.model.embed_tokens(torch.tensor([[1, 2, 3]])).sum() * 3
        late_visitor[0] = is_late
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        late_visitor[0] = False
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        outcore.release(model)
        return weights

    on_time, late = run(False), run(True)
    assert [name for name in on_time if not torch.equal(on_time[name], late[name])] == []


def test_refused_gradients_change_nothing_and_lose_no_buffer(late_visitor: list[bool]) -> None:
    def run(num_refused: int) -> dict[str, Tensor]:
        model = make_model(num_visits=6)
        optimizer = outcore.AdamW(model, lr=1e-3, update_during_backward=True)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.synchronize()
        wait_until_staged(model)
        late_visitor[0] = True
        loss_of(model, 5).backward()
        for _ in range(num_refused):
            with pytest.raises(RuntimeError, match="second gradient"):
                (model.model.embed_tokens.weight * 3).sum().backward()
        late_visitor[0] = False
        optimizer.step()
        optimizer.synchronize()
        loss_of(model, 6).backward()  # would wait for ever if the ring had lost its buffers
        optimizer.step()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        outcore.release(model)
        return weights

    plain, refused = run(0), run(RING_BUFFERS + 1)
    assert [name for name in plain if not torch.equal(plain[name], refused[name])] == []
