"""A checkpoint that is written while training goes on is of its step, and changes nothing."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import ALL_PLACEMENTS, CONFIG, Run, assert_same
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.checkpoint import calls, run_state, snapshot
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import read_manifest
from outcore.errors import StoreError
from outcore.stream.lanes import injected_delays

STEPS = 6
HOST = {"weights": "host", "state": "host"}


ADAMW: dict[str, dict[str, Any]] = {
    "clipping": {},
    "passing": {"max_grad_norm": None, "update_during_backward": True},
}
History = tuple[list[float], list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, History]:
    """The losses, and all tensors after each step, of runs without checkpoints."""
    found = {}
    for name, adamw in ADAMW.items():
        run = Run(tmp_path_factory.mktemp("scratch"), adamw=adamw, **HOST)
        states = [run.tensors()]
        for _ in range(STEPS):
            run.step()
            states.append(run.tensors())
        outcore.release(run.model)
        found[name] = run.losses, states
    return found


@pytest.fixture
def undisturbed(histories: dict[str, History]) -> History:
    return histories["clipping"]


@pytest.mark.parametrize(
    ("mode", "placement"),
    [
        *(("clipping", placement) for placement in ALL_PLACEMENTS),
        *(("passing", placement) for placement in (*ALL_PLACEMENTS[:1], *ALL_PLACEMENTS[3:5])),
    ],
    ids=str,
)
def test_bits_with_checkpoints_in_flight(
    tmp_path: Path,
    placement: dict[str, Any],
    mode: str,
    histories: dict[str, History],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training has the same bits, and each checkpoint is of the step that it was begun at."""
    copying = snapshot._copying

    def slowly_copying(target: Tensor, source: Tensor) -> Callable[[], None]:
        return lambda: (time.sleep(0.004), copying(target, source)())[1]

    monkeypatch.setattr(snapshot, "_copying", slowly_copying)  # so that updates would overtake it
    losses, states = histories[mode]
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=STEPS)
    run = Run(tmp_path, adamw=ADAMW[mode], **placement)
    with injected_delays(0.002, seed=1), AsyncCheckpoints(folder, run.model, run.optimizer) as it:
        assert it.is_async
        for step in range(STEPS):
            run.step()
            if step in (0, 1, 3):
                it.begin(run.values())
    assert run.losses == losses
    assert_same(run.tensors(), states[-1])
    assert folder.steps() == [1, 2, 4]
    for step in (4, 2, 1):
        assert run.load(folder) == step
        assert_same(run.tensors(), states[step])
        shutil.rmtree(folder.directory(step))
    run.train(STEPS - 1)  # random generators and schedule too
    assert run.losses == losses[1:]
    assert_same(run.tensors(), states[-1])


@pytest.mark.parametrize("placement", ALL_PLACEMENTS[3:5], ids=str)
def test_the_files_are_those_of_a_synchronous_one(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    run = Run(tmp_path, **placement)
    folder = CheckpointFolder(tmp_path / "async")
    with injected_delays(0.003, seed=2), AsyncCheckpoints(folder, run.model, run.optimizer) as it:
        run.train(2)
        it.begin(run.values())
        run.train(2)
    again = Run(tmp_path, **placement)
    again.train(2)
    written = again.save(CheckpointFolder(tmp_path / "sync"))
    for path in written.iterdir():
        assert (folder.directory(2) / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list(written.iterdir())) == len(list(folder.directory(2).iterdir()))


def test_training_goes_on_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: History
) -> None:
    goes_on = threading.Event()
    original = calls.sync

    def sync(fd: int) -> None:
        assert goes_on.wait(20)
        original(fd)

    monkeypatch.setattr(calls, "sync", sync)
    run = Run(tmp_path, **HOST)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with AsyncCheckpoints(folder, run.model, run.optimizer) as it:
        run.step()
        it.begin(run.values())
        run.train(3)
        run.optimizer.synchronize()  # updates are done too
        assert it.is_writing
        assert folder.steps() == []
        again = threading.Thread(target=goes_on.set)
        threading.Timer(0.2, again.start).start()
        it.begin(run.values())  # waits for the first
        assert folder.steps()[0] == 1
        assert it.wait() == folder.directory(4)
        again.join()
    assert run.losses == undisturbed[0][:4]


def test_training_goes_on_when_a_failed_one_is_closed(
    tmp_path: Path, undisturbed: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of a checkpoint that could not be written do not take updates with them."""
    run = Run(tmp_path, **HOST)
    checkpoints = AsyncCheckpoints(
        CheckpointFolder(tmp_path / "checkpoints"), run.model, run.optimizer
    )
    copying = snapshot._copying

    def slowly_copying(target: Tensor, source: Tensor) -> Callable[[], None]:
        return lambda: (time.sleep(0.02), copying(target, source)())[1]

    monkeypatch.setattr(snapshot, "_copying", slowly_copying)
    run.step()
    monkeypatch.setattr(calls, "free_bytes", lambda path: 0)
    checkpoints.begin({})
    with pytest.raises(StoreError, match="are free"):
        checkpoints.close()
    run.train(STEPS - 1)
    assert_same(run.tensors(), undisturbed[1][-1])
    assert run.losses == undisturbed[0]


def test_its_memory_is_in_the_books_and_goes_back(tmp_path: Path) -> None:
    run = Run(tmp_path, **HOST)
    ledger = outcore.engine_of(run.model).host_ledger
    it = AsyncCheckpoints(CheckpointFolder(tmp_path / "checkpoints"), run.model, run.optimizer)
    taken = ledger.taken()
    trained = sum(u.layout.trainable_numel for u in outcore.engine_of(run.model).units)
    assert taken["checkpoint staging"] == trained * 12  # weight and two moments, fp32
    run.step()
    it.begin(run.values())
    it.close()
    assert ledger.taken()["checkpoint staging"] == 0
    with pytest.raises(ValueError, match="closed"):
        it.begin(run.values())


def test_without_memory_it_is_synchronous(tmp_path: Path, undisturbed: History) -> None:
    probe = Run(tmp_path, **HOST)
    probe.step()
    used = outcore.engine_of(probe.model).host_ledger.peak_bytes
    run = Run(tmp_path, host_memory=used + 1000, **HOST)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with pytest.warns(RuntimeWarning, match=r"while training waits.*checkpoint staging needs"):
        it = AsyncCheckpoints(folder, run.model, run.optimizer)
    assert not it.is_async
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        for _ in range(2):
            run.step()
            it.begin(run.values())
            assert not it.is_writing
    assert folder.steps() == [1, 2]
    it.close()
    assert_same(run.tensors(), undisturbed[1][2])


def test_no_room_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, **HOST)
    monkeypatch.setattr(calls, "free_bytes", lambda path: 65 << 20)
    with pytest.raises(StoreError, match=r"are kept while one is written.*are free there"):
        AsyncCheckpoints(CheckpointFolder(tmp_path / "it"), run.model, run.optimizer)
    assert outcore.engine_of(run.model).host_ledger.taken().get("checkpoint staging", 0) == 0


def test_values_are_those_of_the_moment(tmp_path: Path) -> None:
    run = Run(tmp_path, **HOST)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with AsyncCheckpoints(folder, run.model, run.optimizer) as it:
        run.step()
        values = {"seen": [1, 2]}
        it.begin(values)
        values["seen"].append(3)
        run.optimizer.param_groups[0]["lr"] = 7.0
        with pytest.raises(ValueError, match="plain JSON"):
            it.begin({"what": object()})
    found = read_manifest(folder.directory(1)).values
    assert found["run"] == {"seen": [1, 2]}
    assert found["optimizer"][0]["lr"] == 1e-2 / 2


class Counting(nn.Module):
    """A block with a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.turned += 1
        return x + self.linear(x)


def counting_model() -> tuple[Any, outcore.AdamW]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Counting(), Counting()]))
    model.forward = lambda x: model[1][1](model[1][0](model[0](x)))
    model = outcore.offload(model, device="cpu", activations="keep")
    return model, outcore.AdamW(model, lr=1e-3)


def test_with_buffers_begin_returns_at_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = counting_model()
    copying, goes_on = snapshot._copying, threading.Event()

    def held_up(target: Tensor, source: Tensor) -> Callable[[], None]:
        return lambda: (goes_on.wait(10), copying(target, source)())[1]

    monkeypatch.setattr(snapshot, "_copying", held_up)
    with AsyncCheckpoints(CheckpointFolder(tmp_path), model, optimizer) as it:
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        threading.Timer(2, goes_on.set).start()
        it.begin({})
        assert not goes_on.is_set()
        goes_on.set()


def test_buffers_are_those_of_the_moment(tmp_path: Path) -> None:
    model, optimizer = counting_model()
    folder = CheckpointFolder(tmp_path, keep=9)

    def step() -> None:
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with injected_delays(0.002, seed=3), AsyncCheckpoints(folder, model, optimizer) as it:
        for _ in range(3):
            step()
            it.begin({"seen": float(model[1][0].seen[0])})
            turned = model[1][0].turned.clone()
            step()
    seen = float(model[1][0].seen[0])
    resumed = run_state.load(folder, model, optimizer)
    assert resumed is not None
    assert float(model[1][0].seen[0]) == resumed.values["seen"] < seen
    assert not model[1][0].turned.is_contiguous()
    assert torch.equal(model[1][0].turned, turned)


def test_where_no_thread_can_be_started_the_next_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model, optimizer = counting_model()
    folder = CheckpointFolder(tmp_path)
    with AsyncCheckpoints(folder, model, optimizer) as it:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                it.begin({})
        it.begin({})
    assert folder.steps() == [0]


def test_reading_and_writing_state_waits_for_the_copy(tmp_path: Path) -> None:
    """What is written to parameters after ``synchronize`` is not in a checkpoint begun before."""
    run = Run(tmp_path, weights="host", state="host", num_visits=3)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with injected_delays(0.01, seed=4), AsyncCheckpoints(folder, run.model, run.optimizer) as it:
        run.train(2)
        expected = run.tensors()
        it.begin(run.values())
        outcore.synchronize(run.model)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()
        run.step()
    other = Run(tmp_path, seed=9, **HOST)
    assert other.load(folder) == 2
    assert_same(other.tensors(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ALL_PLACEMENTS, ids=str)
def test_bits_on_a_gpu(tmp_path: Path, placement: dict[str, Any]) -> None:
    def train(checkpoints: bool) -> tuple[Any, CheckpointFolder]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
        model = outcore.offload(
            model, device="cuda", disk=str(tmp_path), compile=False, **placement
        )
        optimizer = outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)
        folder = CheckpointFolder(tmp_path / "checkpoints", keep=9)
        it = AsyncCheckpoints(folder, model, optimizer) if checkpoints else None
        for step in range(STEPS):
            ids = torch.randint(0, 61, (2, 8)).cuda()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if it is not None and step in (1, 3):
                it.begin({})
        if it is not None:
            it.close()
        tensors = {n: t.clone().cpu() for n, t in model.state_dict().items()}
        for index, entry in optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{k}": v.clone().cpu() for k, v in entry.items()}
        outcore.release(model)
        return tensors, folder

    plain, _ = train(False)
    with injected_delays(0.002, seed=5):
        found, folder = train(True)
    assert_same(found, plain)
    assert folder.steps() == [2, 4]
