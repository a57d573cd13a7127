"""The end of an offload: released models are ordinary again, forgotten ones leave no thread."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import BY_NAME, LR, batch_of, offloaded, relative_difference

import outcore
from outcore.engine.device_limit import DeviceLimit
from outcore.engine.offload import _open_books
from outcore.stream.lanes import Fence

FAMILIES = [BY_NAME[name] for name in ("llama", "llama-tied", "gpt2", "t5", "mixtral", "bert")]


def _train(model: Any, optimizer: Any, family: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(**batch_of(family, seed=step)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def outcore_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("outcore-")}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("options", [{}, {"weights": "device", "num_visits": 2}])
def test_a_released_model_is_an_ordinary_one(family: Any, options: dict[str, Any]) -> None:
    reference = family.make()
    own = {name: set(vars(module)) for name, module in reference.named_modules()}
    model = offloaded(family.make(), **options)
    parameters = list(model.parameters())
    optimizer = outcore.AdamW(model, lr=LR)
    _train(model, optimizer, family, range(2))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcore.release(model)
    assert outcore_threads() == set()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for name, module in model.named_modules():
        assert set(vars(module)) == own[name], name
        assert not module._forward_pre_hooks, name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    # It trains like any model, with torch's own optimizer, and can be cast.
    reference.load_state_dict(expected)
    losses = []
    for net in (model, reference):
        theirs = torch.optim.AdamW(net.parameters(), lr=LR)
        losses.append(_train(net, theirs, family, range(2, 4)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert relative_difference(ours, theirs) <= 1e-5
    model.double()
    with pytest.raises(outcore.OutcoreError):
        optimizer.step()
    with pytest.raises(ValueError, match="not offloaded"):
        outcore.release(model)


def test_offloading_anew_goes_on_with_the_same_bits() -> None:
    family = BY_NAME["llama"]
    model = offloaded(family.make())
    optimizer = outcore.AdamW(model, lr=LR)
    _train(model, optimizer, family, range(2))
    losses = _train(model, optimizer, family, range(2, 4))

    model = offloaded(family.make())
    optimizer = outcore.AdamW(model, lr=LR)
    _train(model, optimizer, family, range(2))
    state = optimizer.state_dict()
    outcore.release(model)
    model = offloaded(model, weights="device", num_visits=2)
    optimizer = outcore.AdamW(model, lr=LR)
    optimizer.load_state_dict(state)
    assert _train(model, optimizer, family, range(2, 4)) == losses


@pytest.mark.parametrize("trained", [False, True])
def test_a_forgotten_model_leaves_nothing_behind(trained: bool) -> None:
    gc.collect()
    before = outcore_threads()
    model = offloaded(BY_NAME["llama"].make(), num_visits=2)
    if trained:
        optimizer = outcore.AdamW(model, lr=LR)
        _train(model, optimizer, BY_NAME["llama"], range(2))
        del optimizer
    assert outcore_threads() - before
    del model
    gc.collect()
    deadline = time.monotonic() + 5
    while outcore_threads() - before and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    assert outcore_threads() - before == set()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "device"},
        {"state": "disk"},
        {"weights": "disk", "state": "disk"},
    ],
    ids=str,
)
def test_a_forgotten_model_leaves_nothing_behind_where_an_update_failed(
    monkeypatch: pytest.MonkeyPatch, disk: Path, options: dict[str, Any]
) -> None:
    """The error is kept for whoever waits, by threads; what they worked on is not kept with it."""
    gc.collect()
    before = outcore_threads()
    model = offloaded(BY_NAME["llama"].make(), disk=str(disk), **options)
    optimizer = outcore.AdamW(model, lr=LR)
    model(**batch_of()).loss.backward()
    with monkeypatch.context() as patched:
        patched.setattr("outcore.optim.updates.ChunkUpdate.apply", lambda *_: 1 / 0)
        optimizer.step()
        try:
            outcore.synchronize(model)
        except outcore.LaneError as error:
            assert "division by zero" in str(error)  # noqa: PT017 - pytest.raises keeps the model
        else:
            pytest.fail("nobody was told")
    del model, optimizer
    deadline = time.monotonic() + 5
    while outcore_threads() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert outcore_threads() - before == set()


def test_a_failed_update_does_not_keep_a_model_from_its_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = outcore_threads()
    model = offloaded(BY_NAME["llama"].make())
    optimizer = outcore.AdamW(model, lr=LR)
    model(**batch_of()).loss.backward()
    with monkeypatch.context() as patched:
        patched.setattr("outcore.optim.updates.ChunkUpdate.apply", lambda *_: 1 / 0)
        optimizer.step()
        with pytest.raises(outcore.LaneError, match="division by zero"):
            outcore.release(model)
    assert outcore_threads() == before
    outcore.release(offloaded(model))


def test_a_model_that_goes_waits_for_weights_that_the_gpu_copies_home() -> None:
    model = offloaded(BY_NAME["llama"].make(), state="device")
    optimizer = outcore.AdamW(model, lr=LR)
    model(**batch_of()).loss.backward()
    optimizer.step()
    unit = model._outcore_engine.units[1]
    waited: list[str] = []
    event: Any = SimpleNamespace(synchronize=lambda: waited.append("the copy home"))
    fence = Fence()
    fence.event = event  # as of work on a stream
    fence.mark_issued()
    unit.update_queued([fence])
    del model, optimizer, unit, fence
    gc.collect()
    assert waited == ["the copy home"]


@pytest.mark.parametrize("budget", [None, 30])
def test_the_limit_of_a_second_model_leaves_room_for_the_first(
    monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    """A GPU of 100 bytes, of which a first model holds 60 and the cache of a released one 10."""
    found: dict[str, float] = {}
    cached = [10]
    for name, function in {
        "empty_cache": lambda: cached.clear(),
        "mem_get_info": lambda device: (40 - sum(cached), 100),
        "memory_reserved": lambda device: 60 + sum(cached),
        "set_per_process_memory_fraction": lambda part, device: found.update(part=part),
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr("outcore.engine.offload._use_expandable_segments", lambda: None)
    options = SimpleNamespace(
        device=torch.device("cuda"), device_memory_bytes=budget, host_memory_bytes=None
    )
    _, device, limit = _open_books(options)  # type: ignore[arg-type]
    assert limit is not None
    assert device.budget_bytes == (budget or 39)
    assert found["part"] == ((budget or 60 + 39) / 100)
    limit.lift()
    assert found["part"] == 1.0


def test_the_limit_of_a_model_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was there before has its own again, and whoever comes after has all of the GPU."""
    set_: list[tuple[float, int | None]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, device: set_.append((part, device.index)),
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first = DeviceLimit(torch.device("cuda"), 0.6)
    second = DeviceLimit(torch.device("cuda", 0), 0.1)
    elsewhere = DeviceLimit(torch.device("cuda", 1), 1.3)
    assert set_ == [(0.6, None), (0.1, 0), (1.0, 1)]
    for limit in (second, second, elsewhere, first):
        limit.lift()
    assert set_[3:] == [(0.6, 0), (1.0, 1), (1.0, None)]


def test_an_older_model_that_goes_leaves_the_newer_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: parts.append(part)
    )
    first, second = (DeviceLimit(torch.device("cuda", 0), part) for part in (0.6, 0.1))
    first.lift()
    assert parts[-1] == 0.1
    second.lift()
    assert parts[-1] == 1.0


@pytest.mark.parametrize("end", [outcore.release, lambda model: outcore.engine_of(model).close()])
def test_the_limit_ends_with_the_engine(end: Any) -> None:
    lifted: list[bool] = []
    model = offloaded(BY_NAME["llama"].make())
    outcore.engine_of(model)._device_limit = SimpleNamespace(lift=lambda: lifted.append(True))
    end(model)
    assert lifted == [True]


def test_the_limit_ends_with_an_engine_that_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another close does nothing: it would stay for all models that come after."""
    lifted: list[bool] = []
    engine = outcore.engine_of(offloaded(BY_NAME["llama"].make()))
    engine._device_limit = SimpleNamespace(lift=lambda: lifted.append(True))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert lifted == [True]
    engine.backend.close()
    engine._copy_in.close()


@pytest.mark.parametrize("where", ["Heap", "Lane", "move_buffers", "Engine"])
def test_an_offload_that_fails_leaves_no_limit_thread_or_file(
    where: str, monkeypatch: pytest.MonkeyPatch, disk: Path
) -> None:
    """Buffers are in no books: a device that is full refuses them when all else is in place."""
    lifted: list[bool] = []
    limit = SimpleNamespace(lift=lambda: lifted.append(True))
    monkeypatch.setattr(
        "outcore.engine.offload._open_books", lambda options: (*_open_books(options)[:2], limit)
    )

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("the device is full")

    before = outcore_threads()
    model = BY_NAME["llama"].make()
    with monkeypatch.context() as patch:
        patch.setattr(f"outcore.engine.offload.{where}", fail)
        with pytest.raises(torch.OutOfMemoryError):
            offloaded(model, disk=str(disk), weights="disk")
    assert lifted == [True]
    assert outcore_threads() == before
    assert list(disk.iterdir()) == []
    outcore.release(offloaded(model))


@pytest.mark.parametrize("is_released", [False, True])
def test_the_memory_of_a_model_before_is_free_for_the_next(is_released: bool) -> None:
    """A model is part of cycles: nothing but a collection ends what was dropped."""
    gc.disable()
    try:
        model = offloaded(BY_NAME["llama"].make())
        engine = weakref.ref(outcore.engine_of(model))
        if is_released:
            outcore.release(model)
        else:
            del model
            assert engine() is not None
            model = offloaded(BY_NAME["llama"].make())
        assert engine() is None
    finally:
        gc.enable()
