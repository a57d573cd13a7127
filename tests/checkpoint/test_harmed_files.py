"""A checkpoint that was changed, cut or made up is refused, by name, and the one before is used."""

from __future__ import annotations

import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import Run, assert_same
from torch import Tensor

from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import NAME, read_manifest
from outcore.errors import StoreError

Saved = tuple[Run, CheckpointFolder, dict[int, dict[str, Tensor]]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A run with two checkpoints, and what they hold."""
    run = Run(tmp_path, weights="host", state="host")
    folder = CheckpointFolder(tmp_path / "checkpoints")
    states = {}
    for step in (1, 2):
        run.step()
        run.save(folder)
        states[step] = run.tensors()
    return run, folder, states


def used_instead(folder: CheckpointFolder) -> tuple[int, str]:
    """Return which checkpoint is used, and what the warning says of the other."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ((_, manifest),) = folder.newest(run_state._check)
    return manifest.step, " ".join(str(each.message) for each in told)


def places(folder: CheckpointFolder, count: int, seed: int) -> list[tuple[Path, int]]:
    """Return ``count`` bytes of the newest checkpoint, each file with its share at least 3."""
    draw = random.Random(seed)
    files = sorted(folder.directory(2).iterdir())
    assert len(files) > 5
    found = [(path, draw.randrange(path.stat().st_size)) for path in files for _ in range(3)]
    weights = [path.stat().st_size for path in files]
    while len(found) < count:
        path = draw.choices(files, weights)[0]
        found.append((path, draw.randrange(path.stat().st_size)))
    return found


def test_a_flipped_bit_at_200_places(saved: Saved) -> None:
    run, folder, states = saved
    chosen = places(folder, 200, seed=1)
    for number, (path, place) in enumerate(chosen):
        original = path.read_bytes()
        changed = bytearray(original)
        changed[place] ^= 1 << (number % 8)
        path.write_bytes(changed)
        step, told = used_instead(folder)
        assert step == 1, (path.name, place)
        assert str(path) in told
        assert "step-000000001 is used in place of step-000000002" in told
        if number % 40 == 0:
            with pytest.warns(UserWarning, match=path.name):
                assert run.load(folder) == 1
            assert_same(run.tensors(), states[1])
        path.write_bytes(original)
    assert used_instead(folder) == (2, "")


def test_every_bit_of_a_manifest_counts(saved: Saved) -> None:
    """Also where the changed text would read as the same values, as 1e-08 and 1E-08 do."""
    _, folder, _ = saved
    path = folder.directory(2) / NAME
    original = path.read_bytes()
    place = original.index(b"1e-08") + 1
    path.write_bytes(original[:place] + b"E" + original[place + 1 :])
    assert json.loads(path.read_text()) == json.loads(original)
    with pytest.raises(StoreError, match="it was changed"):
        read_manifest(folder.directory(2))


def test_files_cut_at_100_lengths(saved: Saved) -> None:
    _, folder, _ = saved
    for path, length in places(folder, 100, seed=2):
        original = path.read_bytes()
        os.truncate(path, length)
        step, told = used_instead(folder)
        assert step == 1, (path.name, length)
        assert str(path) in told
        path.write_bytes(original)
    assert used_instead(folder) == (2, "")


def test_missing_longer_and_linked_files(saved: Saved, tmp_path: Path) -> None:
    _, folder, _ = saved
    path = folder.directory(2) / "unit-00001.safetensors"
    original = path.read_bytes()
    path.write_bytes(original + b"\0")
    assert used_instead(folder)[0] == 1
    path.unlink()
    assert used_instead(folder)[0] == 1
    (tmp_path / "elsewhere").write_bytes(original)
    path.symlink_to(tmp_path / "elsewhere")
    assert used_instead(folder)[0] == 1
    path.unlink()
    os.mkfifo(path)  # to open it would wait for ever
    assert used_instead(folder)[0] == 1
    path.unlink()
    path.write_bytes(original)
    assert used_instead(folder)[0] == 2
    folder.directory(2).rename(tmp_path / "moved")
    (folder.path / "step-000000002").symlink_to(tmp_path / "moved")
    assert used_instead(folder) == (1, "")  # a link is no checkpoint


Change = Callable[[dict[str, Any]], None]


def first(body: dict[str, Any]) -> dict[str, Any]:
    return body["files"][0]


def tensor(body: dict[str, Any], index: int = 1) -> dict[str, Any]:
    return first(body)["tensors"][index]


def add_empty_random(body: dict[str, Any]) -> None:
    """Add a tensor without a byte, of a shape that no memory could be taken for."""
    (file,) = (f for f in body["files"] if "random" in f["name"])
    place = {"offset": file["num_bytes"], "num_bytes": 0, "num_pages": 0, "checksum": 0}
    shape = [0, 2**60, 2**60]
    file["tensors"].append({"name": "cuda.7", "dtype": "U8", "shape": shape, **place})


CHANGES: dict[str, Change] = {
    "name above": lambda b: first(b).update(name="../secret.safetensors"),
    "name far above": lambda b: first(b).update(name="../../../../etc/passwd"),
    "absolute name": lambda b: first(b).update(name="/etc/passwd"),
    "name with a slash": lambda b: first(b).update(name="a/b.safetensors"),
    "name with a null": lambda b: first(b).update(name="a\0.safetensors"),
    "name of a dot": lambda b: first(b).update(name="."),
    "empty name": lambda b: first(b).update(name=""),
    "name that is a number": lambda b: first(b).update(name=3),
    "name that is long": lambda b: first(b).update(name="a" * 4000 + ".safetensors"),
    "name of the manifest": lambda b: first(b).update(name=NAME),
    "file twice": lambda b: b["files"].append(first(b)),
    "tensor twice": lambda b: tensor(b).update(name=tensor(b, 0)["name"]),
    "overlapping": lambda b: tensor(b).update(offset=tensor(b, 0)["offset"]),
    "in the header": lambda b: tensor(b, 0).update(offset=0),
    "hole": lambda b: tensor(b).update(offset=tensor(b)["offset"] + 4096),
    "unaligned": lambda b: tensor(b, 0).update(offset=tensor(b, 0)["offset"] + 1),
    "negative offset": lambda b: tensor(b).update(offset=-4096),
    "offset of 2^64": lambda b: tensor(b).update(offset=2**64),
    "offset that is a float": lambda b: tensor(b).update(offset=4096.0),
    "bytes of 2^63": lambda b: tensor(b).update(num_bytes=2**63),
    "fewer bytes": lambda b: tensor(b).update(num_bytes=1),
    "pages of 2^50": lambda b: tensor(b).update(num_pages=2**50),
    "huge shape": lambda b: tensor(b).update(shape=[2**40, 2**40]),
    "huge shape without a byte": add_empty_random,
    "negative shape": lambda b: tensor(b).update(shape=[-1, -4]),
    "shape of 4000": lambda b: tensor(b).update(shape=[1] * 4000),
    "shape that is none": lambda b: tensor(b).update(shape="3"),
    "true for a number": lambda b: tensor(b).update(num_pages=True),
    "unknown type": lambda b: tensor(b).update(dtype="F1"),
    "type that is a list": lambda b: tensor(b).update(dtype=["F32"]),
    "checksum of 2^64": lambda b: tensor(b).update(checksum=2**64),
    "another key": lambda b: tensor(b).update(more=1),
    "no name": lambda b: tensor(b).pop("name"),
    "header of 2^40": lambda b: first(b).update(num_bytes=2**40, tensors=[]),
    "more bytes than there are": lambda b: first(b).update(num_bytes=2**50),
    "tensors that are none": lambda b: first(b).update(tensors=None),
    "files that are none": lambda b: b.update(files={}),
    "file that is a text": lambda b: b.update(files=["unit"]),
    "values that are none": lambda b: b.update(values=[]),
    "no values": lambda b: b.update(values={}),
    "another step": lambda b: b.update(step=7),
    "step that is a text": lambda b: b.update(step="2"),
    "step below 0": lambda b: b.update(step=-2),
    "another version": lambda b: b.update(version=99),
    "another format": lambda b: b.update(format="x"),
    "no random states": lambda b: b.update(
        files=[f for f in b["files"] if "random" not in f["name"]]
    ),
    "python's state": lambda b: b["values"]["random"].update(python=[3, [1, 2], None]),
    "numpy's state": lambda b: b["values"]["random"].update(numpy=["x", [2**70], 0, 0, 0.0]),
}


# What only a run, or another file, can tell; of all others the manifest itself is refused.
SEEN_LATER = {"no values", "another step", "no random states", "python's state", "numpy's state"}


def write_changed(path: Path, text: str, change: Change) -> None:
    """Write a manifest that was changed by somebody who computed its digest anew."""
    body = json.loads(text)
    del body["digest"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "digest": digest}))


def error_of(directory: Path) -> str:
    try:
        read_manifest(directory)
    except StoreError as error:
        return str(error)
    return ""


def test_made_up_manifests(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused, whatever their digest, before anything outside is opened."""
    run, folder, states = saved
    path = folder.directory(2) / NAME
    original = path.read_text()
    opened: list[str] = []
    real_open = os.open

    def noted_open(path: Any, *rest: Any) -> int:
        opened.append(str(path))
        return real_open(path, *rest)

    monkeypatch.setattr(os, "open", noted_open)
    for name, change in CHANGES.items():
        write_changed(path, original, change)
        if name not in SEEN_LATER:  # whatever the bytes are that it points at, and their checksums
            assert error_of(path.parent), f"{name}: its files would be opened"
        step, told = used_instead(folder)
        assert step == 1, name
        assert "step-000000001 is used in place of step-000000002" in told, name
    with pytest.warns(UserWarning, match="step-000000001 is used"):
        assert run.load(folder) == 1
    assert_same(run.tensors(), states[1])
    inside = folder.path.resolve()
    assert opened
    assert [p for p in opened if not Path(p).resolve().is_relative_to(inside)] == []
    write_changed(path, original, lambda body: None)
    assert used_instead(folder) == (2, "")


def test_a_manifest_that_would_fill_the_memory_is_not_parsed(saved: Saved) -> None:
    _, folder, _ = saved
    path = folder.directory(2) / NAME
    path.write_bytes(b'{"values": [' + b"[]," * 7_000_000 + b"[]]}")
    step, told = used_instead(folder)
    assert step == 1
    assert "it would take more than 1.0 GiB of memory" in told


GROUPS: list[list[Any]] = [
    [],
    [{}],
    [{"lr": -1.0, "betas": [0.9, 0.99], "eps": 0.0, "weight_decay": 0.0}],
    [{"lr": "x", "betas": [0.9, 0.99], "eps": 0.0, "weight_decay": 0.0}],
    [{"lr": 1.0, "betas": [0.9], "eps": 0.0, "weight_decay": 0.0}],
    [3],
]


def test_made_up_hyperparameters_change_nothing(saved: Saved) -> None:
    run, folder, states = saved
    path = folder.directory(2) / NAME
    original = path.read_text()
    for groups in GROUPS:
        write_changed(path, original, lambda body, g=groups: body["values"].update(optimizer=g))
        with pytest.raises(StoreError, match="of another optimizer"):
            run.load(folder)
        assert_same(run.tensors(), states[2])


def test_what_is_no_manifest_at_all(saved: Saved) -> None:
    _, folder, _ = saved
    path = folder.directory(2) / NAME
    for text in (
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"format": 1}',
        "[" * 100_000,
        "\xff",
        '{"a": 1e999}',
    ):
        path.write_text(text, encoding="latin-1")
        assert used_instead(folder)[0] == 1, text[:20]
