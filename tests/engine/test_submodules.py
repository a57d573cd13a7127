"""Parts of an offloaded model used on their own: saved, loaded, written and called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lora
import pytest
import torch
from families import batch_of, offloaded
from torch import Tensor
from training import LLAMA, assert_equal, train, weights_of, with_optimizer

import outcore
from outcore.stream.lanes import injected_delays


@pytest.fixture
def late_updates() -> Iterator[None]:
    with injected_delays(0.03, seed=1):
        yield


def _trained(family: Any = LLAMA, **options: Any) -> Any:
    model, optimizer = with_optimizer(offloaded(family.make(), **options))
    train(model, optimizer, range(2))
    return model


# While updates are in flight


@pytest.mark.usefixtures("late_updates")
@pytest.mark.parametrize("part", ["model", "model.layers", "model.layers.2", "lm_head"])
def test_a_state_dict_waits(part: str) -> None:
    model = _trained()
    found = weights_of(model.get_submodule(part))
    outcore.synchronize(model)
    assert_equal(found, model.get_submodule(part).state_dict())


@pytest.mark.usefixtures("late_updates")
def test_a_state_dict_below_adapters_waits() -> None:
    model = lora.offloaded(lora.plain_model(), frozen_weights=None)
    optimizer = outcore.AdamW(model, lr=1e-2)
    model(**lora.batch()).loss.backward()
    optimizer.step()
    found = weights_of(model.base_model.model)
    outcore.synchronize(model)
    assert_equal(found, model.base_model.model.state_dict())


@pytest.mark.usefixtures("late_updates")
def test_save_pretrained_of_the_inner_model_waits(tmp_path: Path) -> None:
    model = _trained()
    model.model.save_pretrained(tmp_path)
    saved = type(model.model).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert_equal(saved, model.model.state_dict())


@pytest.mark.usefixtures("late_updates")
@pytest.mark.parametrize("part", ["model.layers", "model.layers.1.mlp", "lm_head"])
@pytest.mark.parametrize("options", [{}, {"weights": "device", "num_visits": 2}])
def test_what_is_loaded_is_not_overwritten(part: str, options: dict[str, Any]) -> None:
    model = _trained(**options)
    other = {n: t + 1 for n, t in LLAMA.make().get_submodule(part).state_dict().items()}
    model.get_submodule(part).load_state_dict(other)
    outcore.synchronize(model)
    assert_equal(model.get_submodule(part).state_dict(), other)


def test_a_load_that_broke_off_is_not_the_next_one() -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    layers = model.model.layers
    other = {name: tensor + 1 for name, tensor in LLAMA.make().model.layers.state_dict().items()}

    def break_off(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = layers[1].register_load_state_dict_pre_hook(break_off)
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(model.state_dict())
    hook.remove()
    with injected_delays(0.03, seed=1):
        train(model, optimizer, range(2))
        layers.load_state_dict(other)
        outcore.synchronize(model)
    assert_equal(layers.state_dict(), other)


def test_many_modules_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _trained()
    engine = model._outcore_engine
    waits = []
    synchronize = engine.backend.synchronize
    monkeypatch.setattr(engine.backend, "synchronize", lambda: (waits.append(1), synchronize()))
    state = model.state_dict()
    assert len(waits) == 1
    model.load_state_dict(state)
    assert len(waits) == 2


def test_a_load_hides_no_write_elsewhere() -> None:
    model, plain = offloaded(LLAMA.make()).eval(), LLAMA.make().eval()
    ids = batch_of()["input_ids"]
    with torch.no_grad():
        model(ids)
        for net in (model, plain):
            net.model.layers[0].mlp.down_proj.weight.mul_(3)
            net.model.layers[1].load_state_dict(net.model.layers[2].state_dict())
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)


# Writes in place


def _write_blocks(net: Any) -> None:
    net.model.layers[1].mlp.down_proj.weight.mul_(3)


def _write_edges(net: Any) -> None:
    net.model.embed_tokens.weight.mul_(3)
    net.model.norm.weight.mul_(2)


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "inner model": lambda net, ids: net.model(input_ids=ids).last_hidden_state,
    "forward": lambda net, ids: net.forward(input_ids=ids).logits,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("write", [_write_blocks, _write_edges])
def test_a_write_is_noticed_by_every_kind_of_call(call: Any, write: Any) -> None:
    model, plain = offloaded(LLAMA.make(), num_slots=4).eval(), LLAMA.make().eval()
    ids = batch_of()["input_ids"]
    with torch.no_grad():
        call(model, ids)
        for net in (model, plain):
            write(net)
        torch.testing.assert_close(call(model, ids), call(plain, ids))


def test_training_by_forward_follows_writes_to_resident_weights() -> None:
    """An edge's master is on the host: a write to the weight on the device must reach it."""
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    plain = LLAMA.make().train()
    theirs = torch.optim.AdamW(plain.parameters(), lr=optimizer.param_groups[0]["lr"])
    for net, steps in ((model, optimizer), (plain, theirs)):
        for seed in range(2):
            with torch.no_grad():
                net.model.embed_tokens.weight.mul_(1.5)
            steps.zero_grad()
            net.forward(**batch_of(seed=seed)).loss.backward()
            steps.step()
            outcore.synchronize(model)  # as before every write: updates may be under way
    ours = model.state_dict()["model.embed_tokens.weight"]
    torch.testing.assert_close(ours, plain.model.embed_tokens.weight.detach())


def test_other_memory_for_a_parameter_is_refused() -> None:
    """Its home would be trained, and what is saved would be the values that never were."""
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    for part in (model.model.layers[1].mlp.down_proj, model.model.norm):
        at_home = part.weight.data
        part.weight.data = part.weight * 2
        with pytest.raises(outcore.OutcoreError, match="was given other memory"):
            model(**batch_of())
        with pytest.raises(outcore.OutcoreError, match="was given other memory"):
            optimizer.take_over_writes()  # before a checkpoint
        part.weight.data = at_home
    torch.testing.assert_close(model(**batch_of()).loss, LLAMA.make()(**batch_of()).loss)


def test_parameters_that_are_views_of_a_vector_wait_for_release() -> None:
    model, plain = offloaded(LLAMA.make()), LLAMA.make()
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.equal(vector, torch.nn.utils.parameters_to_vector(plain.parameters()))
    torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())
    with pytest.raises(outcore.OutcoreError, match=r"copy_\(values\)"):
        model(**batch_of())
    outcore.release(model)
    for net in (model, plain):
        torch.nn.utils.vector_to_parameters(vector * 2, net.parameters())
    torch.testing.assert_close(model(**batch_of()).loss, plain(**batch_of()).loss)


# Moves and casts


@pytest.mark.parametrize("part", ["", "model", "model.layers.0.mlp"])
def test_a_cast_to_what_is_there_changes_nothing(part: str) -> None:
    model = offloaded(LLAMA.make())
    module = model.get_submodule(part)
    for same in (module.float(), module.cpu(), module.to(torch.float32), module.to("cpu")):
        assert same is module


@pytest.mark.parametrize("part", ["", "model", "model.layers.0.mlp"])
@pytest.mark.parametrize("method", ["half", "double", "share_memory"])
def test_another_cast_is_refused(part: str, method: str) -> None:
    module = offloaded(LLAMA.make()).get_submodule(part)
    with pytest.raises(outcore.OutcoreError, match="cannot be moved or cast"):
        getattr(module, method)()
    assert not any(parameter.is_shared() for parameter in module.parameters())
