"""A checkpoint is committed whole or not at all, and every byte of it is checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outcore.checkpoint import calls
from outcore.checkpoint.entries import FileEntry
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import NAME, Manifest, read_manifest
from outcore.checkpoint.tensor_file import Layout, check_file, read_tensors, write_tensors
from outcore.errors import StoreError


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


def names(folder: Path) -> list[str]:
    """Return all that is in a folder of checkpoints, unfinished ones too."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


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
    assert names(tmp_path) == ["step-000000005", "step-000000030"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 4, seed=0)
    directory = save(folder, 4, seed=1)
    found = torch.empty(5000)
    read_tensors(directory, read_manifest(directory).files[0], [("moment", found)])
    assert torch.equal(found, dict(some_tensors(1))["moment"])
    assert folder.steps() == [4]
    assert names(tmp_path) == ["step-000000004-1"]


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
            with pytest.warns(UserWarning, match=f"step-000000002.*{name}"):
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
            with pytest.warns(UserWarning, match=f"step-000000002.*{name}"):
                assert newest(folder) == 1, f"{name}, {length} bytes"
        path.write_bytes(original)


def test_without_any_that_is_whole_the_reasons_are_named(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (save(folder, 1) / NAME).write_text("{}")
    with pytest.raises(StoreError, match=r"no checkpoint can be used.*manifest.*; put whole ones"):
        newest(folder)
    assert newest(CheckpointFolder(tmp_path / "empty")) is None


def test_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(StoreError, match="are free there"):
        folder.commit(1, 1 << 60, lambda directory: pytest.fail("was written"))
    assert names(tmp_path) == []


def test_what_a_crash_left_is_removed_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".writing-3-abc").mkdir()
    (tmp_path / ".writing-3-abc" / "state.safetensors").write_bytes(b"half")
    save(CheckpointFolder(tmp_path), 4)
    assert names(tmp_path) == ["step-000000004"]


def test_the_order_of_calls_makes_it_durable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the rename, every file is synced after its last write, and the directory after all."""
    trace: list[tuple[str, object]] = []
    paths: dict[int, str] = {}
    real_create, real_rename = calls.create, calls.rename

    def create(path: Path) -> int:
        fd = real_create(path)
        paths[fd] = path.name
        trace.append(("create", path.name))
        return fd

    def watch(name: str) -> None:
        real = getattr(calls, name)

        def call(first: Any, *rest: Any) -> Any:
            trace.append((name, paths[first] if isinstance(first, int) else first.name))
            return real(first, *rest)

        monkeypatch.setattr(calls, name, call)

    for name in ("write_at", "sync", "sync_directory"):
        watch(name)
    monkeypatch.setattr(calls, "create", create)

    def rename(source: Path, target: Path) -> None:
        trace.append(("rename", source.name))
        real_rename(source, target)

    monkeypatch.setattr(calls, "rename", rename)
    save(CheckpointFolder(tmp_path), 1)
    renamed = next(i for i, (name, _) in enumerate(trace) if name == "rename")
    before, after = trace[:renamed], trace[renamed + 1 :]
    for file in ("state.safetensors", NAME):
        mine = [name for name, path in before if path == file]
        assert mine[0] == "create"
        assert "write_at" in mine
        assert mine[-1] == "sync"
    assert before[-1] == ("sync_directory", trace[renamed][1])
    assert after == [("sync_directory", tmp_path.name)]


def test_the_names_of_new_folders_are_synced_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(calls, "sync_directory", synced.append)
    save(CheckpointFolder(tmp_path / "a" / "b" / "c"), 1)
    assert synced[:3] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)

    def other_process() -> str:
        """Return what a process that knows nothing of this one is told."""
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                CheckpointFolder(tmp_path).check_ready(1, step=1)
            except BaseException as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        os.wait()
        with os.fdopen(read) as answer:
            return answer.read()

    assert "another process writes here" in other_process()
    folder.close()
    assert other_process() == ""


def test_a_harmed_one_neither_counts_nor_stays(tmp_path: Path) -> None:
    """Else a run that went on from an older one would remove its own newest checkpoint."""
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 20)
    whole = (tmp_path / "step-000000020").rename(tmp_path / "aside")
    (save(folder, 30) / NAME).write_text("{}")
    whole.rename(tmp_path / "step-000000020")
    with pytest.warns(UserWarning, match="step-000000020 is used in place of step-000000030"):
        assert newest(folder) == 20
    save(folder, 25)
    assert names(tmp_path) == ["step-000000025"]


def test_checkpoints_of_another_run_are_refused_up_front_and_never_removed(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 90)
    fresh = CheckpointFolder(tmp_path, keep=1)
    with pytest.raises(StoreError, match="of step 90, and this run begins at step 0"):
        fresh.check_ready(1000, step=0)
    save(fresh, 2)
    save(fresh, 3)
    assert fresh.steps() == [3, 90]


def test_room_for_all_that_are_kept_is_asked_for_up_front(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    monkeypatch.setattr(calls, "free_bytes", lambda path: 10 << 30)
    folder.check_ready(3 << 30, step=0)
    with pytest.raises(
        StoreError, match=r"takes 4\.0 GiB, and up to 2 are kept.*12\.0 GiB.*10\.0 GiB"
    ):
        folder.check_ready(4 << 30, step=0)
    folder.check_ready(4 << 30, step=0, num_saves=2)
    with pytest.raises(StoreError, match=r"so 11\.0 GiB more are needed"):
        folder.check_ready(11 << 30, step=0, num_saves=1)
    monkeypatch.setattr(calls, "size_of_tree", lambda path: 4 << 30)
    save(folder, 1)
    folder.check_ready(4 << 30, step=1)  # what is there already will be removed


def test_a_checkpoint_that_just_fits_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is asked for to spare when a run begins must not cost it the state at its end."""
    folder = CheckpointFolder(tmp_path)
    monkeypatch.setattr(calls, "free_bytes", lambda path: 1000)
    with pytest.raises(StoreError, match=r"64\.0 MiB to spare; 1000 B are free"):
        folder.check_ready(1000, step=0)
    folder.commit(1, 1000, lambda directory: ((), {}))
    assert folder.steps() == [1]
    with pytest.raises(StoreError, match="a checkpoint takes 1001 B, 1000 B are free there"):
        folder.commit(2, 1001, lambda directory: ((), {}))
    assert folder.steps() == [1]


def test_a_run_that_begins_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=9)
    for step in (2, 4, 6):
        save(folder, step)
    (tmp_path / ".removing-step-000000001-abc").mkdir()
    (tmp_path / ".writing-8-abc").mkdir()
    CheckpointFolder(tmp_path, keep=2).check_ready(1000, step=6)
    assert names(tmp_path) == ["step-000000004", "step-000000006"]
