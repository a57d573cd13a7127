"""Scratch files on bad days: the bytes that were written, or a StoreError; never others."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from disk_faults import FAULTS, PAGE_BYTES, Faults, aligned, pattern

from outcore.errors import StoreError
from outcore.kernels.checksum import Bytes
from outcore.store import disk_calls
from outcore.store.ledger import Ledger
from outcore.store.scratch_file import ScratchFile, ScratchOptions

PAGES = (3, 1, 2)
SCENARIO = [
    ("write", 0),
    ("write", 1),
    ("write", 2),
    ("read", 1),
    ("read", 0),
    ("write", 0),
    ("read", 2),
    ("read", 0),
]


def make(directory: Path, ledger: Ledger | None = None, *, direct: bool = True) -> ScratchFile:
    return ScratchFile(
        directory,
        "w",
        [num_pages * PAGE_BYTES for num_pages in PAGES],
        ledger=ledger or Ledger("disk", None),
        options=ScratchOptions(piece_bytes=2 * PAGE_BYTES, num_threads=2, direct=direct),
    )


def write(file: ScratchFile, index: int, seed: int) -> bytes:
    value = pattern(file.layout.records[index].num_bytes, seed)
    file.write(index, memoryview(value))
    return value.tobytes()


def read(file: ScratchFile, index: int) -> bytes:
    target = aligned(file.layout.records[index].num_bytes)
    file.read(index, memoryview(target))
    return target.tobytes()


def play(file: ScratchFile) -> list[StoreError]:
    """Play the scenario and return its errors; every other outcome must be right."""
    errors: list[StoreError] = []
    values: dict[int, bytes | None] = {}  # None: the last write failed
    for seed, (what, index) in enumerate(SCENARIO):
        try:
            if what == "write":
                values[index] = None
                values[index] = write(file, index, seed)
            else:
                found = read(file, index)
                assert found == values[index]
        except StoreError as error:
            errors.append(error)
    for error in errors:
        assert error.path == file.path
        assert f"{file.path}: " in str(error)
        assert f"offset {error.offset}" in str(error)
    return errors


def count_calls(directory: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> int:
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        with make(directory, direct=direct) as file:
            assert play(file) == []
        return faults.num_calls


@pytest.mark.timeout(60)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, direct: bool
) -> None:
    num_calls = count_calls(tmp_path, monkeypatch, direct)
    assert num_calls > 20
    num_open = len(os.listdir("/proc/self/fd"))
    struck: set[str | None] = set()
    refusals: list[StoreError] = []
    for at in range(num_calls):
        ledger = Ledger("disk", None)
        with monkeypatch.context() as patch:
            faults = Faults(patch, at=at, fault=fault)
            try:
                file = make(tmp_path, ledger, direct=direct)
            except StoreError as error:
                refusals.append(error)
            else:
                with file:
                    errors = play(file)
                    # One fault: at most the operation that it hit, and reads of what it lost.
                    assert len({error.offset for error in errors}) <= 2
                    # The file is as good as before, for the lost record too.
                    faults.paused = True
                    for index in range(len(PAGES)):
                        assert write(file, index, 100 + index) == read(file, index)
                    faults.paused = False
            struck.add(faults.struck)
        assert ledger.taken_bytes == 0
        assert not list(tmp_path.iterdir())
    assert {"create", "allocate", "read_at", "write_at", "status", "close"} <= struck
    assert {error.path for error in refusals} <= {tmp_path / "w.scratch"}
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("fault", ["EINTR", "short"])
def test_harmless_faults_are_not_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    for at in range(count_calls(tmp_path, monkeypatch, True)):
        with monkeypatch.context() as patch:
            faults = Faults(patch, at=at, fault=fault)
            try:
                with make(tmp_path) as file:
                    errors = play(file)
            except StoreError:
                assert faults.struck not in ("read_at", "write_at", "allocate")
                continue
            assert errors == [] or faults.struck == "status"


@pytest.mark.usefixtures("by_piece")
def test_the_words_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path) as file:
        write(file, 1, 1)
        place = file.layout.records[1].offset
        for code, remedy in ((errno.EIO, "dmesg"), (errno.ENOSPC, "free space")):
            with monkeypatch.context() as patch:
                patch.setattr(disk_calls, "read_at", failing_with(code))
                patch.setattr(disk_calls, "write_at", failing_with(code))
                for go in (lambda: read(file, 1), lambda: write(file, 1, 2)):
                    with pytest.raises(StoreError, match=f"offset {place}: .*{remedy}") as caught:
                        go()
                    assert caught.value.offset == place
            with pytest.raises(StoreError, match="last write failed"):
                read(file, 1)
            write(file, 1, 1)


def failing_with(code: int) -> object:
    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_store_errors_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(StoreError("text", path=Path("/a"), offset=5)))
    assert (str(copy), copy.path, copy.offset) == ("text", Path("/a"), 5)


@pytest.mark.usefixtures("by_piece")
def test_a_transfer_that_never_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path) as file:
        monkeypatch.setattr(disk_calls, "write_at", lambda *_: 100)
        with pytest.raises(StoreError, match="takes 100 bytes and no more"):
            write(file, 0, 1)


@pytest.mark.usefixtures("by_piece")
@pytest.mark.parametrize("what", ["read_at", "write_at"])
def test_memory_is_not_touched_after_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The first piece fails at once; the second is still under way and must end first."""
    with make(tmp_path) as file:
        write(file, 0, 1)
        begun, ended = threading.Event(), threading.Event()
        call = getattr(disk_calls, what)

        def uneven(fd: int, memory: Bytes, offset: int) -> int:
            if offset == 0:
                assert begun.wait(20)
                raise OSError(errno.EIO, "injected")
            begun.set()
            time.sleep(0.1)
            ended.set()
            return int(call(fd, memory, offset))

        monkeypatch.setattr(disk_calls, what, uneven)
        with pytest.raises(StoreError, match="drive failed"):
            read(file, 0) if what == "read_at" else write(file, 0, 2)
        assert ended.is_set()


# What happens to the file itself, without any injection.


def damage(file: ScratchFile, offset: int, replacement: bytes) -> bytes:
    """Overwrite bytes behind the file's back; return the old ones."""
    with open(file.path, "r+b") as raw:
        raw.seek(offset)
        old = raw.read(len(replacement))
        raw.seek(offset)
        raw.write(replacement)
        raw.flush()
        os.fsync(raw.fileno())
    return old


@pytest.mark.parametrize("direct", [True, False])
def test_damage_on_disk_is_noticed(tmp_path: Path, direct: bool) -> None:
    with make(tmp_path, direct=direct) as file:
        first, second, third = (write(file, index, index) for index in range(3))
        record = file.layout.records[0]

        def expect_mismatch() -> None:
            with pytest.raises(StoreError, match="not those written") as caught:
                read(file, 0)
            assert caught.value.offset == record.offset
            assert read(file, 1) == second
            assert read(file, 2) == third

        for place in (0, 1, PAGE_BYTES, record.num_bytes - 1):  # a bit
            damage(file, record.offset + place, bytes([first[place] ^ 0x10]))
            expect_mismatch()
            damage(file, record.offset + place, first[place : place + 1])
            assert read(file, 0) == first
        zeroed = damage(file, PAGE_BYTES, bytes(PAGE_BYTES))
        expect_mismatch()
        damage(file, 0, zeroed + first[:PAGE_BYTES])  # two pages that changed places
        expect_mismatch()
        damage(file, 0, first)
        assert read(file, 0) == first


@pytest.mark.usefixtures("by_piece")
def test_a_lost_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that says done and keeps the older bytes."""
    with make(tmp_path) as file:
        write(file, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(disk_calls, "write_at", lambda fd, source, offset: source.size)
            write(file, 0, 2)
        with pytest.raises(StoreError, match="not those written"):
            read(file, 0)


@pytest.mark.usefixtures("by_piece")
def test_a_misdirected_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path) as file:
        values = [write(file, index, index) for index in range(3)]
        write_at = disk_calls.write_at
        with monkeypatch.context() as patch:
            patch.setattr(
                disk_calls, "write_at", lambda fd, s, offset: write_at(fd, s, offset + PAGE_BYTES)
            )
            write(file, 1, 5)  # lands on record 2
        for index in (1, 2):
            with pytest.raises(StoreError, match="not those written"):
                read(file, index)
        assert read(file, 0) == values[0]


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    with make(tmp_path) as file:
        first = write(file, 0, 1)
        write(file, 2, 2)
        os.truncate(file.path, file.layout.records[2].offset + 100)
        with pytest.raises(StoreError, match="cut to 16484 bytes") as caught:
            read(file, 2)
        assert caught.value.offset == file.layout.records[2].offset
        with pytest.raises(StoreError, match="cut"):
            write(file, 2, 3)
        assert read(file, 0) == first


def test_a_file_that_is_cut_during_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as file:
        write(file, 2, 2)
        uncut = disk_calls.status(file._file.fd)
        for left in (0, 100, PAGE_BYTES, PAGE_BYTES + 100):
            write(file, 2, 2)
            os.truncate(file.path, file.layout.records[2].offset + left)
            with monkeypatch.context() as patch:
                patch.setattr(disk_calls, "status", lambda _: uncut)
                with pytest.raises(StoreError, match="early"):
                    read(file, 2)
            os.truncate(file.path, file.layout.num_bytes)


def test_a_file_that_was_deleted(tmp_path: Path) -> None:
    with make(tmp_path) as file:
        write(file, 0, 1)
        file.path.unlink()
        for go in (lambda: read(file, 0), lambda: write(file, 1, 1)):
            with pytest.raises(StoreError, match="was deleted") as caught:
                go()
            assert caught.value.path == file.path


# Full disks: refused before anything starts.


def test_more_than_is_free_is_refused(tmp_path: Path) -> None:
    ledger = Ledger("disk", None)
    with pytest.raises(StoreError, match=r"needs 1024\.0 TiB, .* are free\..*larger disk"):
        ScratchFile(tmp_path, "w", [1 << 50], ledger=ledger)
    assert ledger.taken_bytes == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_refused_allocation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(disk_calls, "allocate", failing_with(code))
    with pytest.raises(StoreError, match=r"are free|ulimit -f"):
        make(tmp_path)
    assert not list(tmp_path.iterdir())


FULL = """
import mmap, resource, signal, sys
from pathlib import Path
from outcore.errors import StoreError
from outcore.kernels.checksum import Bytes
from outcore.store.ledger import Ledger
from outcore.store.scratch_file import ScratchFile
directory = Path(sys.argv[1])
SETUP
first = ScratchFile(directory, "first", [256 << 10], ledger=Ledger("disk", None))
try:
    ScratchFile(directory, "second", [4 << 20], ledger=Ledger("disk", None))
except StoreError as error:
    print(error)
assert [path.name for path in directory.iterdir()] == ["first.scratch"]
memory = memoryview(mmap.mmap(-1, 256 << 10))
first.write(0, memory)
first.read(0, memory)
"""


def test_a_small_file_system(tmp_path: Path) -> None:
    """A real one of 1 MiB, in a mount namespace of its own."""
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable]
    probe = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs tmpfs "$1"', "sh", str(tmp_path)]
    try:
        possible = subprocess.run(probe, capture_output=True).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("cannot mount here")
    result = subprocess.run(
        [*command, FULL.replace("SETUP", "")], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "needs 4.0 MiB, 768.0 KiB are free" in result.stdout


def test_a_file_size_limit(tmp_path: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    code = FULL.replace("SETUP", f"{limit}; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)")
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "ulimit -f" in result.stdout
