"""What is on disk is also looked at through views of its file: harm to it is told there too.

A view of a file that was cut ends the process (SIGBUS), so the cut cases are known to hold only
where a test gets to its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME

import outcore
from outcore.checkpoint import run_state
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import LaneError, StoreError

Trained = tuple[Any, Any]


def step(model: Any, optimizer: Any, seed: int) -> None:
    ids = torch.randint(0, 90, (4, 8), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@pytest.fixture
def trained(disk: Path) -> Iterator[Trained]:
    model = outcore.offload(
        BY_NAME["llama"].make().train(), device="cpu", disk=disk, weights="disk", state="disk"
    )
    optimizer = outcore.AdamW(model, lr=1e-2)
    step(model, optimizer, 0)
    outcore.synchronize(model)
    yield model, optimizer
    if hasattr(model, "_outcore_engine"):
        outcore.engine_of(model).close()
    assert list(disk.iterdir()) == [], "scratch files are left behind"


def scratch_file(disk: Path, name: str) -> Path:
    (path,) = disk.glob(f"*/{name}.scratch")
    return path


def flip(path: Path, offset: int = 5000) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def save_checkpoint(model: Any, optimizer: Any, path: Path) -> None:
    run_state.save(CheckpointFolder(path / "checkpoints"), model, optimizer, {})


def save_while_training(model: Any, optimizer: Any, path: Path) -> None:
    with AsyncCheckpoints(CheckpointFolder(path / "checkpoints"), model, optimizer) as checkpoints:
        checkpoints.begin({})


LOOKS: dict[str, tuple[set[str], Callable[[Any, Any, Path], object]]] = {
    "state_dict": ({"weights"}, lambda model, optimizer, path: model.state_dict()),
    "a layer's": ({"weights"}, lambda model, _, path: model.model.layers[0].state_dict()),
    "inside another": (
        {"weights"},
        lambda model, _, path: torch.nn.ModuleList([model]).state_dict(),
    ),
    "optimizer": ({"state"}, lambda model, optimizer, path: optimizer.state_dict()),
    "save_pretrained": ({"weights"}, lambda model, _, path: model.save_pretrained(path / "saved")),
    "checkpoint": ({"weights", "state"}, save_checkpoint),
    "async": ({"weights", "state"}, save_while_training),
    "release": ({"weights"}, lambda model, optimizer, path: outcore.release(model)),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ["weights", "state"])
def test_no_wrong_value_is_shown_or_saved(
    trained: Trained, disk: Path, tmp_path: Path, name: str, look: str
) -> None:
    files, call = LOOKS[look]
    flip(scratch_file(disk, name))
    if name in files:
        with pytest.raises((StoreError, LaneError), match=rf"{name}.scratch.* not those written"):
            call(*trained, tmp_path)
        assert not list(tmp_path.glob("checkpoints/step-*"))
    else:
        call(*trained, tmp_path)


@pytest.mark.parametrize("look", [*LOOKS, "step", "synchronize"])
def test_an_update_that_failed_is_told_once_by_all_that_wait_for_it(
    trained: Trained, disk: Path, tmp_path: Path, look: str
) -> None:
    calls: dict[str, Callable[[Any, Any, Path], object]] = {
        "step": lambda model, optimizer, _: step(model, optimizer, 2),
        "synchronize": lambda model, *_: outcore.synchronize(model),
        **{name: call for name, (_, call) in LOOKS.items()},
    }
    path = scratch_file(disk, "state")
    flip(path)
    step(*trained, 1)
    with pytest.raises(StoreError) as caught:
        calls[look](*trained, tmp_path)
    assert isinstance(caught.value, LaneError)
    assert (caught.value.path, caught.value.offset) == (path, 0)
    assert type(caught.value.__cause__) is StoreError
    assert str(caught.value) == f"background work failed: {caught.value.__cause__}"


def load_weights(model: Any, optimizer: Any) -> None:
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(values, strict=False)


def load_state(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(torch.optim.AdamW(list(model.parameters())).state_dict())


@pytest.mark.parametrize(
    "call",
    [
        outcore.synchronize,
        lambda model: model.state_dict(),
        lambda model: model.load_state_dict(BY_NAME["llama"].make().state_dict()),
        outcore.release,
    ],
    ids=["synchronize", "state_dict", "load_state_dict", "release"],
)
@pytest.mark.parametrize("name", ["weights", "state"])
def test_a_file_that_was_cut_is_not_looked_at(
    trained: Trained, disk: Path, name: str, call: Callable[[Any], object]
) -> None:
    os.truncate(scratch_file(disk, name), 4096)
    with pytest.raises(StoreError, match=rf"{name}.scratch.* cut to 4096 bytes"):
        call(trained[0])


def test_optimizer_state_that_was_cut_is_not_looked_at(trained: Trained, disk: Path) -> None:
    _, optimizer = trained
    os.truncate(scratch_file(disk, "state"), 4096)
    with pytest.raises(StoreError, match="cut to 4096 bytes"):
        optimizer.state_dict()
    with pytest.raises(StoreError, match="cut to 4096 bytes"):
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(("load", "harmed"), [(load_weights, "state"), (load_state, "weights")])
def test_loading_one_does_not_take_over_harm_to_the_other(
    trained: Trained, disk: Path, load: Callable[[Any, Any], None], harmed: str
) -> None:
    model, optimizer = trained
    flip(scratch_file(disk, harmed))
    load(model, optimizer)

    def go_on() -> None:
        step(model, optimizer, 1)
        outcore.synchronize(model)

    with pytest.raises(LaneError, match="not those written"):
        go_on()


def test_what_a_user_wrote_is_no_harm(trained: Trained) -> None:
    model, _ = trained
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.fill_(0.25)
    assert bool((model.state_dict()["model.layers.0.mlp.up_proj.weight"] == 0.25).all())
    outcore.release(model)
    assert bool((weight == 0.25).all())


def test_names_can_be_listed_without_reading_the_disk(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained
    monkeypatch.setattr(outcore.engine_of(model), "check_weights_on_disk", None)
    assert model.state_dict(keep_vars=True)
