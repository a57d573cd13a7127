"""State on disk that waits in the gradients' memory: the same bits, and never a gradient lost."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from disk_by_piece import leave_all_to_python
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.errors import LaneError
from outcore.optim import disk_updater
from outcore.optim.spare_gradients import SpareGradients
from outcore.store import disk_calls
from outcore.stream import lanes
from outcore.stream.lanes import Fence, injected_delays
from outcore.stream.staging import Guest

PAGE_BYTES = 4096
pytestmark = pytest.mark.timeout(120)


# --- who may have the memory ----------------------------------------------------------------------


def units(num: int, numel: int) -> list[Any]:
    return [
        SimpleNamespace(index=10 + i, layout=SimpleNamespace(trainable_numel=numel))
        for i in range(num)
    ]


def spare_of(some: list[Any]) -> SpareGradients:
    num_bytes = SpareGradients.num_bytes(some, torch.float32)
    return SpareGradients(some, torch.zeros(num_bytes, dtype=torch.uint8), torch.float32)


def use(spare: SpareGradients, some: list[Any]) -> None:
    """A backward and a step, whose updates have not read anything yet."""
    for unit in reversed(some):
        spare.comes(unit)
    for unit in some:
        spare.will_be_read(unit)


def test_nothing_is_lent_that_a_gradient_may_be_added_to() -> None:
    some = units(2, 1024)
    spare = spare_of(some)
    use(spare, some)
    for unit in some:
        spare.was_read(unit)
    assert spare.free_bytes() == 0  # a further backward would add to them
    spare.cleared()
    assert spare.free_bytes() == 2 * PAGE_BYTES


def test_what_an_update_has_not_read_is_not_lent() -> None:
    some = units(3, 1024)
    spare = spare_of(some)
    use(spare, some)
    spare.cleared()
    assert spare.lend(PAGE_BYTES) is None
    spare.was_read(some[0])
    spare.was_read(some[2])  # the one before it comes first
    assert spare.free_bytes() == PAGE_BYTES
    assert spare.lend(PAGE_BYTES) is not None
    assert spare.lend(PAGE_BYTES) is None


def test_two_steps_may_be_queued() -> None:
    some = units(1, 1024)
    spare = spare_of(some)
    use(spare, some)
    spare.cleared()
    use(spare, some)
    spare.cleared()
    spare.was_read(some[0])
    assert spare.free_bytes() == 0
    spare.was_read(some[0])
    assert spare.free_bytes() == PAGE_BYTES


def test_memory_that_a_dropped_gradient_is_still_copied_to_is_not_lent() -> None:
    some, copied = units(1, 1024), Fence()
    spare = spare_of(some)
    spare.comes(some[0])
    spare.arrives_behind(some[0], copied)
    spare.cleared()
    spare.cleared()
    assert spare.lend(PAGE_BYTES) is None
    copied.mark_issued()
    assert spare.lend(PAGE_BYTES) is not None


def test_a_gradient_waits_for_those_who_have_its_memory() -> None:
    some = units(4, 1024)  # a page each
    spare = spare_of(some)
    spare.cleared()
    first, second = spare.lend(1), spare.lend(2 * PAGE_BYTES)
    assert first is not None
    assert second is not None
    assert first.memory.numel() == PAGE_BYTES
    assert spare.comes(some[3]) == []
    assert spare.comes(some[2]) == [second.free]
    assert spare.comes(some[1]) == [second.free]
    assert spare.comes(some[0]) == [first.free]
    assert spare.lend(1) is None


def test_memory_is_lent_again_when_all_of_it_is_back() -> None:
    some = units(2, 1024)
    spare = spare_of(some)
    spare.cleared()
    first, second = spare.lend(PAGE_BYTES), spare.lend(PAGE_BYTES)
    spare.cleared()
    for guest in (first, second):
        assert spare.lend(PAGE_BYTES) is None
        assert guest is not None
        guest.free.mark_issued()
    again = spare.lend(PAGE_BYTES)
    assert again is not None
    assert first is not None
    assert again.memory.data_ptr() == first.memory.data_ptr()


# --- training -------------------------------------------------------------------------------------


def make(**options: Any) -> tuple[Any, outcore.AdamW]:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=20,  # more than are read ahead
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=97,
    )
    torch.manual_seed(0)
    model = outcore.offload(LlamaForCausalLM(config).train(), device="cpu", **options)
    return model, outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)


def backward(model: Any, seed: int) -> float:
    ids = torch.randint(0, 97, (2, 8), generator=torch.Generator().manual_seed(seed))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def num_lent(model: Any) -> int:
    return outcore.engine_of(model).backend._waiting.spare.num_lent


def everything(model: Any, optimizer: outcore.AdamW) -> dict[Any, torch.Tensor]:
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        tensors |= {(index, name): value.clone() for name, value in entry.items()}
    return tensors


Actions = Callable[[Any, outcore.AdamW], list[float]]


def assert_same(disk: Path, act: Actions, **options: Any) -> int:
    """Compare state on the host with state on disk; return how often memory was lent."""
    model, optimizer = make()
    losses = act(model, optimizer)
    expected = everything(model, optimizer)
    outcore.release(model)
    model, optimizer = make(disk=str(disk), weights="host", state="disk", **options)
    with injected_delays(0.002, seed=1):
        assert act(model, optimizer) == losses
        found = everything(model, optimizer)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    lent = num_lent(model)
    outcore.release(model)
    return lent


def plain_steps(model: Any, optimizer: outcore.AdamW) -> list[float]:
    losses = []
    for step in range(6):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_steps_have_the_same_bits_and_use_the_memory(disk: Path) -> None:
    assert assert_same(disk, plain_steps) > 0


def test_gradients_that_nobody_clears_stay(disk: Path) -> None:
    def act(model: Any, optimizer: outcore.AdamW) -> list[float]:
        losses = []
        for step in range(3):
            losses.append(backward(model, step))
            optimizer.step()
        return losses

    with pytest.warns(UserWarning, match="nothing has cleared them"):
        assert assert_same(disk, act) == 0


@pytest.mark.filterwarnings("ignore:backward.. adds to gradients")
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls(disk: Path, seed: int) -> None:
    def act(model: Any, optimizer: outcore.AdamW) -> list[float]:
        source, losses = random.Random(seed), []
        for number in range(24):
            match source.choice(["step", "step", "step", "backward", "step only", "look", "wait"]):
                case "step":
                    losses.append(backward(model, number))
                    optimizer.step()
                    optimizer.zero_grad()
                case "backward":
                    losses.append(backward(model, number))
                case "step only":  # twice with the same gradients, or with none
                    optimizer.step()
                case "look":
                    optimizer.state_dict()
                case "wait":
                    outcore.synchronize(model)
            if source.random() < 0.2:
                optimizer.zero_grad()
        return losses

    assert_same(disk, act)


def test_after_steps_without_time_some_is_held_again(disk: Path) -> None:
    model, optimizer = make(disk=str(disk), weights="host", state="disk")
    rest = outcore.engine_of(model).backend._updaters._disk._rest
    rest.limit_bytes = 0
    with injected_delays(0.002, seed=1):
        plain_steps(model, optimizer)
        outcore.synchronize(model)
    assert num_lent(model) > 0
    outcore.release(model)


def test_a_dropped_gradient_that_comes_late_lands_in_no_state(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that skips blocks does not wait for their updates, which still borrow memory."""
    is_copying_slowly = False

    def delay(_: Any = None) -> None:
        match threading.current_thread().name:
            case "outcore-copy-out":
                time.sleep(0.35 * is_copying_slowly)
            case "outcore-disk-adamw":
                time.sleep(0.03)
            case "outcore-disk-writes":
                time.sleep(0.05)

    def act(model: Any, optimizer: outcore.AdamW) -> list[float]:
        nonlocal is_copying_slowly
        losses = [backward(model, 1)]
        optimizer.step()
        optimizer.zero_grad()
        is_copying_slowly, model.config.num_hidden_layers = True, 1
        losses.append(backward(model, 2))
        optimizer.zero_grad()
        is_copying_slowly, model.config.num_hidden_layers = False, 20
        outcore.synchronize(model)
        losses.append(backward(model, 3))
        optimizer.step()
        optimizer.zero_grad()
        return losses

    for module in (lanes, disk_updater):
        monkeypatch.setattr(module, "injected_delay", delay)
    assert assert_same(disk, act) > 0


def note_guests(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Guest]:
    """Return a list of what will be lent."""
    guests: list[Guest] = []
    spare = outcore.engine_of(model).backend._waiting.spare
    lend = spare.lend

    def noted(num_bytes: int) -> Guest | None:
        guest: Guest | None = lend(num_bytes)
        if guest is not None:
            guests.append(guest)
        return guest

    monkeypatch.setattr(spare, "lend", noted)
    return guests


def test_memory_is_not_free_before_what_waits_there_is_written(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(disk=str(disk), weights="host", state="disk")
    guests, written = note_guests(model, monkeypatch), threading.Event()
    write_at = disk_calls.write_at

    def late(fd: int, source: Any, offset: int) -> int:
        address = source.ctypes.data
        for guest in guests:
            if 0 <= address - guest.memory.data_ptr() < guest.memory.numel():
                written.wait(30)
        return write_at(fd, source, offset)

    leave_all_to_python(monkeypatch)
    monkeypatch.setattr(disk_calls, "write_at", late)
    with injected_delays(0.002, seed=1):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        for unit in outcore.engine_of(model).units:
            unit.block_until_updated()
    assert guests
    assert [guest for guest in guests if guest.free.is_issued] == []
    written.set()
    outcore.synchronize(model)
    for guest in guests:
        guest.free.block()
    outcore.release(model)


def test_state_that_cannot_be_set_aside_is_told_and_nobody_waits_for_ever(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(disk=str(disk), weights="host", state="disk")
    guests = note_guests(model, monkeypatch)

    def fail(*_: Any) -> None:
        raise LaneError("no lane")

    monkeypatch.setattr(disk_updater.disk_tensors, "set_aside", fail)
    with injected_delays(0.002, seed=1):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(LaneError, match="no lane"):
            outcore.synchronize(model)
    assert guests
    for guest in guests:
        guest.free.block()
    outcore.engine_of(model).close()


def test_lanes_that_are_closed_keep_no_update_from_its_end() -> None:
    """A close does not wait for ever for a read; its update is told all the same."""

    def release(*_: Any) -> None:
        raise LaneError("closed")

    guest = Guest(memory=torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    fetched: Any = [(SimpleNamespace(release=release), torch.zeros(1), Fence())]
    disk_updater._release(fetched, guest)
    assert guest.free.is_issued


@pytest.mark.parametrize("call", ["read_at", "write_at"])
def test_a_call_that_fails_is_told_and_gives_the_memory_back(
    call: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(disk=str(disk), weights="host", state="disk")
    guests: list[Guest] = []
    works = getattr(disk_calls, call)

    def fail(*arguments: Any) -> int:
        if guests:
            raise OSError(errno.EIO, "Input/output error")
        return int(works(*arguments))

    leave_all_to_python(monkeypatch)
    with injected_delays(0.002, seed=1):
        plain_steps(model, optimizer)  # what was never written is not read
        outcore.synchronize(model)
        guests = note_guests(model, monkeypatch)
        monkeypatch.setattr(disk_calls, call, fail)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(LaneError, match="Input/output error"):
            outcore.synchronize(model)
    assert guests
    for guest in guests:
        guest.free.block()  # nobody waits for ever, and none of them carries the error
    outcore.engine_of(model).close()
