"""Records move in one call, and what that leaves moves piece by piece, to the same end."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest
from disk_faults import PAGE_BYTES, aligned, pattern
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import StoreError
from outcore.kernels.checksum import Bytes, checksum_pages
from outcore.kernels.disk_pieces import Moved, Part
from outcore.store import disk_calls
from outcore.store.ledger import Ledger
from outcore.store.scratch_file import ScratchFile, ScratchOptions

PAGES = (3, 1, 8, 2)
Move = Callable[..., list[Moved]]


def make(directory: Path, *, direct: bool = True) -> ScratchFile:
    return ScratchFile(
        directory,
        "w",
        [pages * PAGE_BYTES for pages in PAGES],
        ledger=Ledger("disk", None),
        options=ScratchOptions(piece_bytes=2 * PAGE_BYTES, num_threads=2, direct=direct),
    )


def values(seed: int) -> list[Bytes]:
    return [pattern(pages * PAGE_BYTES, seed + i) for i, pages in enumerate(PAGES)]


def write_all(file: ScratchFile, new: Sequence[Bytes]) -> None:
    file.write_all([(i, memoryview(value)) for i, value in enumerate(new)])


def read_all(file: ScratchFile) -> list[bytes]:
    targets = [aligned(pages * PAGE_BYTES) for pages in PAGES]
    file.read_all([(i, memoryview(target)) for i, target in enumerate(targets)])
    return [target.tobytes() for target in targets]


def only(move: Move, chosen: Callable[[int], bool]) -> Move:
    """Return a call that is hindered at all pieces but those whose number is chosen."""

    def move_some(fd: int, parts: Sequence[Part], *, piece_bytes: int, threads: int) -> list[Moved]:
        moved = []
        for part in parts:
            checksum, left = 0, []
            for start in range(0, part.memory.size, piece_bytes):
                if not chosen(start // piece_bytes):
                    left.append(start)
                    continue
                piece = part.memory[start : start + piece_bytes]
                call = disk_calls.read_at if move is READ else disk_calls.write_at
                assert call(fd, piece, part.offset + start) == piece.size
                checksum += checksum_pages(piece, first_page=start // PAGE_BYTES, seed=part.seed)
            moved.append(Moved(checksum=checksum % 2**64, left=left))
        return moved

    return move_some


READ, WRITE = disk_calls.read_parts, disk_calls.write_parts


@pytest.mark.parametrize("direct", [True, False])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.sets(st.integers(0, 3)), read=st.sets(st.integers(0, 3)))
def test_whatever_the_call_leaves_is_moved(
    tmp_path: Path, direct: bool, written: set[int], read: set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch, make(tmp_path, direct=direct) as file:
        patch.setattr(disk_calls, "write_parts", only(WRITE, written.__contains__))
        patch.setattr(disk_calls, "read_parts", only(READ, read.__contains__))
        new = values(1)
        write_all(file, new)
        expected = [value.tobytes() for value in new]
        assert read_all(file) == expected
        patch.undo()
        assert read_all(file) == expected  # with the checksums of the other way


def test_both_ways_read_what_either_wrote(tmp_path: Path, by_piece: None) -> None:
    with make(tmp_path) as file:
        new = values(1)
        write_all(file, new)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk_calls, "read_parts", READ)
            patch.setattr(disk_calls, "write_parts", WRITE)
            assert read_all(file) == [value.tobytes() for value in new]
            newer = values(10)
            write_all(file, newer)
        assert read_all(file) == [value.tobytes() for value in newer]


def test_damage_to_one_record_is_named(tmp_path: Path) -> None:
    with make(tmp_path) as file:
        write_all(file, values(1))
        offset = file.layout.records[2].offset
        with open(file.path, "r+b") as raw:
            raw.seek(offset + 5000)
            raw.write(b"other bytes")
        with pytest.raises(StoreError, match=r"record 2 .* not those written") as caught:
            read_all(file)
        assert caught.value.offset == offset


def test_a_failed_write_loses_all_its_records_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_piece: None
) -> None:
    with make(tmp_path) as file:
        old = values(1)
        write_all(file, old)
        offset, write_at = file.layout.records[2].offset, disk_calls.write_at

        def fail_at_record_2(fd: int, source: Bytes, at: int) -> int:
            if at == offset:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return write_at(fd, source, at)

        with monkeypatch.context() as patch:
            patch.setattr(disk_calls, "write_at", fail_at_record_2)
            with pytest.raises(StoreError, match=f"offset {offset}: "):
                file.write_all([(i, memoryview(values(10)[i])) for i in (1, 2)])
        for index in (1, 2):
            with pytest.raises(StoreError, match="last write failed"):
                file.read(index, memoryview(aligned(PAGES[index] * PAGE_BYTES)))
        for index in (0, 3):
            target = aligned(PAGES[index] * PAGE_BYTES)
            file.read(index, memoryview(target))
            assert target.tobytes() == old[index].tobytes()
        write_all(file, old)
        assert read_all(file) == [value.tobytes() for value in old]


@pytest.mark.timeout(60)
def test_many_who_want_the_same_records_in_other_orders(tmp_path: Path) -> None:
    """Nobody waits in a ring, and whoever reads finds what somebody wrote, record by record."""
    with make(tmp_path) as file, ThreadPoolExecutor(6) as threads:
        write_all(file, values(0))
        known = [{values(seed)[i].tobytes() for seed in range(4)} for i in range(len(PAGES))]

        def work(number: int) -> None:
            order = list(range(len(PAGES)))[:: 1 if number % 2 else -1]
            for _ in range(20):
                if number < 3:
                    new = values(number + 1)
                    file.write_all([(i, memoryview(new[i])) for i in order])
                    continue
                targets = [aligned(PAGES[i] * PAGE_BYTES) for i in order]
                file.read_all([(i, memoryview(t)) for i, t in zip(order, targets, strict=True)])
                for i, target in zip(order, targets, strict=True):
                    assert target.tobytes() in known[i]

        for done in [threads.submit(work, number) for number in range(6)]:
            done.result(50)


@pytest.mark.timeout(60)
def test_closing_waits_for_the_call_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor closed too early may be another file's when the bytes arrive."""
    file = make(tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int, parts: Sequence[Part], *, piece_bytes: int, threads: int) -> list[Moved]:
        begun.set()
        assert go_on.wait(20)
        return WRITE(fd, parts, piece_bytes=piece_bytes, threads=threads)

    monkeypatch.setattr(disk_calls, "write_parts", slow)
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(write_all, file, values(1))
        assert begun.wait(20)
        closing = threads.submit(file.close)
        with pytest.raises(FutureTimeoutError):  # its own class before Python 3.11
            closing.result(0.2)
        assert file.path.exists()
        go_on.set()
        writing.result(20)
        closing.result(20)
    assert not file.path.exists()
    with pytest.raises(StoreError, match="the file is closed"):
        write_all(file, values(1))
