"""A checkpoint is committed whole or not at all, and every byte of it is checked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outcore.checkpoint import calls
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import NAME, FileEntry, Manifest, read_manifest
from outcore.checkpoint.tensor_file import Layout, check_file, read_tensors, write_tensors
from outcore.errors import StoreError
from outcore.store import disk_calls


def some_tensors(seed: int = 0) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    return [
        ("weight", torch.randn(700, 3).to(torch.bfloat16)),
        ("moment", torch.randn(5000)),
        ("bytes", torch.randint(0, 255, (4096,), dtype=torch.uint8)),
        ("one", torch.ones(())),
    ]


def save(folder: CheckpointFolder, step: int, seed: int = 0) -> Path:
    tensors = some_tensors(seed)

    def write_files(directory: Path) -> tuple[tuple[FileEntry, ...], dict[str, object]]:
        return (write_tensors(directory / "state.safetensors", tensors),), {"lr": 0.1}

    return folder.commit(step, Layout.of(tensors).num_bytes, write_files)


def check(directory: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        check_file(directory, file)


def newest(folder: CheckpointFolder) -> int | None:
    found = list(folder.newest(check))
    return found[0][1].step if found else None


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    directory = save(CheckpointFolder(tmp_path), 7)
    manifest = read_manifest(directory)
    assert manifest.step == 7
    assert manifest.values == {"lr": 0.1}
    found = {name: torch.empty_like(tensor) for name, tensor in some_tensors()}
    read_tensors(directory, manifest.files[0], found.items())
    for name, tensor in some_tensors():
        assert torch.equal(found[name], tensor), name


def test_other_tools_read_the_file(tmp_path: Path) -> None:
    directory = save(CheckpointFolder(tmp_path), 1)
    found = load_file(directory / "state.safetensors")
    for name, tensor in some_tensors():
        assert torch.equal(found[name], tensor), name


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 5, 30):
        save(folder, step)
    assert folder.steps() == [5, 30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000005", "step-000000030"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 4, seed=0)
    directory = save(folder, 4, seed=1)
    found = torch.empty(5000)
    read_tensors(directory, read_manifest(directory).files[0], [("moment", found)])
    assert torch.equal(found, dict(some_tensors(1))["moment"])
    assert folder.steps() == [4]


def test_any_flipped_bit_is_found_and_the_one_before_is_used(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    directory = save(folder, 2)
    generator = torch.Generator().manual_seed(3)
    for name in ("state.safetensors", NAME):
        path = directory / name
        original = path.read_bytes()
        for place in torch.randint(0, len(original), (100,), generator=generator).tolist():
            changed = bytearray(original)
            changed[place] ^= 1 << (place % 8)
            path.write_bytes(changed)
            assert newest(folder) == 1, f"{name}, byte {place}"
        path.write_bytes(original)
    assert newest(folder) == 2


def test_a_file_cut_at_any_length_is_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    directory = save(folder, 2)
    for name in ("state.safetensors", NAME):
        path = directory / name
        original = path.read_bytes()
        for length in range(0, len(original), max(1, len(original) // 50)):
            path.write_bytes(original[:length])
            assert newest(folder) == 1, f"{name}, {length} bytes"
        path.write_bytes(original)


def test_without_any_that_is_whole_the_reasons_are_named(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (save(folder, 1) / NAME).write_text("{}")
    with pytest.raises(StoreError, match=r"no checkpoint can be used.*manifest"):
        newest(folder)
    assert newest(CheckpointFolder(tmp_path / "empty")) is None


CALLS: list[tuple[Any, str]] = [
    (calls, "make_directory"),
    (calls, "create"),
    (calls, "allocate"),
    (calls, "write"),
    (calls, "sync"),
    (calls, "sync_directory"),
    (calls, "rename"),
    (disk_calls, "write_at"),
]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("module", "name"), CALLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_each_call_that_fails_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: Any, name: str, code: int
) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    count, original = 0, getattr(module, name)

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args)

    monkeypatch.setattr(module, name, counting)
    save(folder, 2)
    assert count > 0
    for failing in range(count):
        monkeypatch.setattr(module, name, fails_at(failing, original, code))
        with pytest.raises(StoreError, match=os.strerror(code)):
            save(folder, 3)
        monkeypatch.setattr(module, name, original)
        assert newest(folder) in (2, 3)  # the last rename may have happened
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".writing")]


def fails_at(call: int, original: Callable[..., Any], code: int) -> Callable[..., Any]:
    left = call

    def fail_once(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(code, os.strerror(code))
        return original(*args)

    return fail_once


def test_short_writes_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = calls.write
    monkeypatch.setattr(calls, "write", lambda fd, data: original(fd, data[:100]))
    save(CheckpointFolder(tmp_path), 1)
    assert newest(CheckpointFolder(tmp_path)) == 1


def test_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(StoreError, match="are free there"):
        folder.commit(1, 1 << 60, lambda directory: pytest.fail("was written"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_crash_left_is_removed_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".writing-3-abc").mkdir()
    (tmp_path / ".writing-3-abc" / "state.safetensors").write_bytes(b"half")
    save(CheckpointFolder(tmp_path), 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000004"]
