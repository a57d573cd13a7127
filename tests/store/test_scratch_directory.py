"""Scratch directories: gone at exit, gone after a crash, and nobody else's files touched."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outcore.errors import StoreError
from outcore.store.scratch_directory import ScratchDirectory, remove_leftovers

OWNER = """
import sys, time
from outcore.store.ledger import Ledger
from outcore.store.scratch_directory import ScratchDirectory
from outcore.store.scratch_file import ScratchFile
directory = ScratchDirectory(sys.argv[1])
file = ScratchFile(directory.path, "weights", [8192], ledger=Ledger("disk", None))
print(directory.path, flush=True)
END
"""


def start_owner(parent: Path, end: str = "time.sleep(60)") -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.replace("END", end), str(parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def leftover(parent: Path, name: str = "outcore-scratch-123-0123abcd") -> Path:
    """What a process that died leaves: a directory, a lock that nobody holds, a file."""
    path = parent / name
    path.mkdir()
    (path / "lock").touch()
    (path / "weights.scratch").write_bytes(b"x" * 100)
    return path


def test_lives_in_a_with_block(tmp_path: Path) -> None:
    with ScratchDirectory(tmp_path) as directory:
        assert directory.path.parent == tmp_path
        assert directory.path.stat().st_mode & 0o777 == 0o700
        (directory.path / "weights.scratch").touch()
        assert remove_leftovers(tmp_path) == []
        with ScratchDirectory(tmp_path) as other:
            assert other.path != directory.path
            assert directory.path.exists()
    assert not list(tmp_path.iterdir())
    directory.close()  # once more does nothing


def test_goes_when_nobody_refers_to_it(tmp_path: Path) -> None:
    directory = ScratchDirectory(tmp_path)
    del directory
    assert not list(tmp_path.iterdir())


def test_goes_from_another_working_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = ScratchDirectory("disk")
    monkeypatch.chdir("/")
    (directory.path / "weights.scratch").touch()
    directory.close()
    assert not list((tmp_path / "disk").iterdir())


def test_goes_at_exit_with_an_error_too(tmp_path: Path) -> None:
    process, path = start_owner(tmp_path, "raise RuntimeError")
    process.communicate(timeout=60)
    assert path.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_killed_process_is_cleaned_up_after_by_the_next(tmp_path: Path) -> None:
    process, path = start_owner(tmp_path)
    try:
        assert remove_leftovers(tmp_path) == []  # it lives
        assert (path / "weights.scratch").stat().st_size == 8192
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert (path / "weights.scratch").exists()
    with ScratchDirectory(tmp_path) as directory:
        assert [p.name for p in tmp_path.iterdir()] == [directory.path.name]


def test_foreign_files_stay_and_keep_the_directory(tmp_path: Path) -> None:
    path = leftover(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (path / "notes.txt").write_text("precious")
    (path / "weights.scratch.bak").write_text("precious")
    (path / "link.scratch").symlink_to(victim)
    (path / "folder.scratch").mkdir()
    assert remove_leftovers(tmp_path) == []
    names = {p.name for p in path.iterdir()}
    assert names == {"notes.txt", "weights.scratch.bak", "link.scratch", "folder.scratch"}
    assert victim.read_text() == "precious"
    assert remove_leftovers(tmp_path) == []  # nor the second time
    assert {p.name for p in path.iterdir()} == names


@pytest.mark.parametrize(
    "name",
    [
        "scratch",
        "outcore-scratch",
        "outcore-scratch-123",
        "outcore-scratch-123-0123abcd.bak",
        "outcore-scratch-x-0123abcd",
        "my-outcore-scratch-123-0123abcd",
    ],
)
def test_directories_of_other_names_stay(tmp_path: Path, name: str) -> None:
    path = leftover(tmp_path, name)
    assert remove_leftovers(tmp_path) == []
    assert (path / "weights.scratch").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = leftover(elsewhere)
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "outcore-scratch-123-0123abcd").symlink_to(target)
    assert remove_leftovers(parent) == []
    assert (target / "weights.scratch").exists()
    # A lock that is a link is not ours either.
    linked = leftover(parent, "outcore-scratch-124-0123abcd")
    (linked / "lock").unlink()
    (linked / "lock").symlink_to(tmp_path / "lock")
    (tmp_path / "lock").touch()
    assert remove_leftovers(parent) == []
    assert (linked / "weights.scratch").exists()


def test_another_users_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leftover(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_leftovers(tmp_path) == []
    assert (path / "weights.scratch").exists()


def test_a_start_that_died_before_it_had_a_lock(tmp_path: Path) -> None:
    (tmp_path / "outcore-scratch-123-0123abcd").mkdir()
    full = tmp_path / "outcore-scratch-124-0123abcd"
    full.mkdir()
    (full / "weights.scratch").touch()  # without a lock it was never ours
    assert [path.name for path in remove_leftovers(tmp_path)] == ["outcore-scratch-123-0123abcd"]
    assert (full / "weights.scratch").exists()


def test_many_starts_at_once(tmp_path: Path) -> None:
    """Each sweeps while the others create; nobody loses a directory that is in use."""
    for number in range(20):
        leftover(tmp_path, f"outcore-scratch-{number}-0123abcd")

    def start(_: int) -> bool:
        with ScratchDirectory(tmp_path) as directory:
            (directory.path / "weights.scratch").touch()
            remove_leftovers(tmp_path)
            return (directory.path / "weights.scratch").exists()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(start, range(100)))
    assert not list(tmp_path.iterdir())


def test_a_sweep_between_creating_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept = []

    def late_flock(fd: int, operation: int) -> None:
        if not swept:
            swept.append(True)
            assert len(remove_leftovers(tmp_path)) == 1
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with ScratchDirectory(tmp_path) as directory:
        assert (directory.path / "lock").exists()
        assert len(list(tmp_path.iterdir())) == 1


def test_a_parent_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a directory"):
        ScratchDirectory(tmp_path / "unmounted")
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="local disk"):
        ScratchDirectory(tmp_path)
    assert not list(tmp_path.iterdir())
