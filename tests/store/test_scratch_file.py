"""Scratch files: what is written is read back, from any thread, in any order."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from disk_faults import PAGE_BYTES, Faults, aligned, pattern
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import OutOfBudget, StoreError
from outcore.kernels.checksum import Bytes
from outcore.store import disk_calls
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger
from outcore.store.record_layout import RecordLayout
from outcore.store.scratch_file import ScratchFile, ScratchOptions

SMALL_PIECES = ScratchOptions(piece_bytes=2 * PAGE_BYTES, num_threads=3)


def make(directory: Path, *pages: int, options: ScratchOptions = SMALL_PIECES) -> ScratchFile:
    sizes = [num_pages * PAGE_BYTES for num_pages in pages]
    return ScratchFile(directory, "w", sizes, ledger=Ledger("disk", None), options=options)


def read(file: ScratchFile, index: int) -> bytes:
    target = aligned(file.layout.records[index].num_bytes)
    file.read(index, memoryview(target))
    return target.tobytes()


@given(st.lists(st.integers(1, 10 * PAGE_BYTES), min_size=1, max_size=20))
def test_records_lie_behind_each_other_on_whole_pages(sizes: list[int]) -> None:
    layout = RecordLayout.of(sizes)
    end = 0
    for index, (record, size) in enumerate(zip(layout.records, sizes, strict=True)):
        assert (record.index, record.offset) == (index, end)
        assert record.offset % PAGE_BYTES == record.num_bytes % PAGE_BYTES == 0
        assert size <= record.num_bytes < size + PAGE_BYTES
        end = record.end
    assert layout.num_bytes == end
    assert layout.largest_bytes == max(record.num_bytes for record in layout.records)


@pytest.mark.parametrize("sizes", [[], [0], [100, -1]])
def test_layouts_that_make_no_sense(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="record"):
        RecordLayout.of(sizes)


@pytest.mark.usefixtures("by_piece")
def test_every_thread_has_a_request_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write_at = disk_calls.write_at

    def counting(fd: int, source: Bytes, offset: int) -> int:
        sizes.append(len(source))
        return write_at(fd, source, offset)

    monkeypatch.setattr(disk_calls, "write_at", counting)
    for pages, requests in ((1 << 11, 4), (1 << 13, 4), (1 << 14, 8), (1 << 8, 1)):
        with make(tmp_path, pages, options=ScratchOptions()) as file:
            sizes.clear()
            file.write(0, memoryview(pattern(pages * PAGE_BYTES, 1)))
        assert len(sizes) == requests
        assert sum(sizes) == pages * PAGE_BYTES


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_comes_back_as_written(tmp_path: Path, memory_disk: Path, where: str, direct: bool) -> None:
    options = ScratchOptions(piece_bytes=2 * PAGE_BYTES, direct=direct)
    with make(tmp_path if where == "disk" else memory_disk, 1, 7, 4, options=options) as file:
        for round_ in range(2):
            values = [pattern(r.num_bytes, 10 * round_ + r.index) for r in file.layout.records]
            for index in (2, 0, 1):
                file.write(index, memoryview(values[index]))
            for index in (1, 2, 0):
                assert read(file, index) == values[index].tobytes()
        assert file.is_direct <= direct


def test_tensors_of_any_type_in_an_arena(tmp_path: Path) -> None:
    arena = HostArena(8 * PAGE_BYTES, purpose="state", ledger=Ledger("host", None), pin=False)
    source = arena.span(2 * PAGE_BYTES, torch.bfloat16)  # 4 pages
    target = arena.span(PAGE_BYTES, torch.float32)
    source.view(torch.int16).random_()
    source.requires_grad_()
    with make(tmp_path, 4) as file:
        file.write(0, source.view(8, -1))
        file.read(0, target)
    assert torch.equal(target.view(torch.int16), source.detach().view(torch.int16))


def test_memory_that_does_not_fit(tmp_path: Path) -> None:
    with make(tmp_path, 2) as file:
        with pytest.raises(ValueError, match="8192 bytes, not 4096"):
            file.write(0, memoryview(aligned(PAGE_BYTES)))
        with pytest.raises(ValueError, match="starts on a page"):
            file.write(0, memoryview(aligned(3 * PAGE_BYTES)[256 : 256 + 2 * PAGE_BYTES]))
        with pytest.raises(ValueError, match="contiguous"):
            file.write(0, torch.zeros(2, 2 * PAGE_BYTES, dtype=torch.uint8).T)
        with pytest.raises(ValueError, match="host memory"):
            file.write(0, torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8, device="meta"))
        with pytest.raises(ValueError, match="never written"):
            file.read(0, memoryview(aligned(2 * PAGE_BYTES)))
        file.write(0, memoryview(aligned(2 * PAGE_BYTES)).toreadonly())
        with pytest.raises(ValueError, match="read-only"):
            file.read(0, memoryview(aligned(2 * PAGE_BYTES)).toreadonly())
        with pytest.raises(IndexError):
            file.write(1, memoryview(aligned(PAGE_BYTES)))


@pytest.mark.parametrize("options", [{"num_threads": 0}, {"piece_bytes": 0}, {"piece_bytes": 5000}])
def test_options_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ScratchOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "../w", "a.b", "ä"])
def test_names_that_would_not_be_cleaned_up(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name"):
        ScratchFile(tmp_path, name, [1], ledger=Ledger("disk", None))


def test_allocated_in_full_private_and_deleted(tmp_path: Path) -> None:
    ledger = Ledger("disk", 100 * PAGE_BYTES)
    with ScratchFile(tmp_path, "w", [99 * PAGE_BYTES, 1], ledger=ledger) as file:
        status = file.path.stat()
        assert status.st_size == ledger.taken_bytes == 100 * PAGE_BYTES
        assert status.st_blocks * 512 >= status.st_size
        assert stat.S_IMODE(status.st_mode) == 0o600
        with pytest.raises(OutOfBudget, match=r"disk space: scratch v .* disk budget"):
            ScratchFile(tmp_path, "v", [1], ledger=ledger)
    assert not list(tmp_path.iterdir())
    assert ledger.taken_bytes == 0
    file.close()  # once more does nothing


def test_an_existing_file_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "w.scratch").write_text("mine")
    (tmp_path / "link.scratch").symlink_to(tmp_path / "nowhere")
    for name in ("w", "link"):
        with pytest.raises(StoreError, match="exists"):
            ScratchFile(tmp_path, name, [1], ledger=Ledger("disk", None))
    assert (tmp_path / "w.scratch").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_dropped_files_are_released(tmp_path: Path) -> None:
    ledger = Ledger("disk", None)
    num_open = len(os.listdir("/proc/self/fd"))
    file = ScratchFile(tmp_path, "w", [1], ledger=ledger)
    file.write(0, memoryview(aligned(PAGE_BYTES)))
    del file
    assert ledger.taken_bytes == 0
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_put_in_our_place_is_left_alone(tmp_path: Path) -> None:
    with make(tmp_path, 1) as file:
        file.path.unlink()
        file.path.write_text("mine")
    assert file.path.read_text() == "mine"


def test_closed(tmp_path: Path) -> None:
    file = make(tmp_path, 1)
    file.write(0, memoryview(aligned(PAGE_BYTES)))
    file.close()
    with pytest.raises(StoreError, match="closed"):
        file.read(0, memoryview(aligned(PAGE_BYTES)))
    with pytest.raises(StoreError, match="closed"):
        file.write(0, memoryview(aligned(PAGE_BYTES)))


def test_direct_io_falls_back_where_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL at the flag, at the first write and at the first read: each means the page cache."""
    with monkeypatch.context() as patch:
        counter = Faults(patch)
        make(tmp_path, 1).close()
        num_calls = counter.num_calls
    struck = []
    for at in range(num_calls):
        with monkeypatch.context() as patch:
            faults = Faults(patch, at=at, fault="EINVAL")
            if at not in (3, 4, 5):  # not free_bytes, create, allocate; not status, close
                continue
            with make(tmp_path, 3) as file:
                assert not file.is_direct
                value = pattern(3 * PAGE_BYTES, 1)
                file.write(0, memoryview(value))
                assert read(file, 0) == value.tobytes()
            struck.append(faults.struck)
    assert struck == ["set_direct", "write_at", "read_at"]


def test_the_flag_is_really_set(tmp_path: Path) -> None:
    with make(tmp_path, 1) as file:
        if not file.is_direct:
            pytest.skip("this file system has no O_DIRECT")
        with pytest.raises(OSError, match="Invalid argument"):
            disk_calls.write_at(file._file.fd, aligned(PAGE_BYTES)[1:], 0)


@pytest.mark.usefixtures("by_piece")
def test_a_read_waits_for_the_write_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path, 4, 1) as file, ThreadPoolExecutor(3) as threads:
        old, new = pattern(4 * PAGE_BYTES, 1), pattern(4 * PAGE_BYTES, 2)
        file.write(0, memoryview(old))
        file.write(1, memoryview(pattern(PAGE_BYTES, 3)))
        begun, go_on = threading.Event(), threading.Event()
        write_at = disk_calls.write_at

        def slow_write(fd: int, source: np.ndarray, offset: int) -> int:  # type: ignore[type-arg]
            begun.set()
            assert go_on.wait(20)
            return write_at(fd, source, offset)

        monkeypatch.setattr(disk_calls, "write_at", slow_write)
        writing = threads.submit(file.write, 0, memoryview(new))
        assert begun.wait(20)
        reading = threads.submit(read, file, 0)
        assert read(file, 1) == pattern(PAGE_BYTES, 3).tobytes()  # others do not wait
        time.sleep(0.05)
        assert not reading.done()
        go_on.set()
        writing.result(20)
        assert reading.result(20) == new.tobytes()


@pytest.mark.usefixtures("by_piece")
def test_a_write_waits_for_the_read_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path, 4) as file, ThreadPoolExecutor(3) as threads:
        old, new = pattern(4 * PAGE_BYTES, 1), pattern(4 * PAGE_BYTES, 2)
        file.write(0, memoryview(old))
        begun, go_on = threading.Event(), threading.Event()
        read_at = disk_calls.read_at

        def slow_read(fd: int, target: np.ndarray, offset: int) -> int:  # type: ignore[type-arg]
            begun.set()
            assert go_on.wait(20)
            return read_at(fd, target, offset)

        monkeypatch.setattr(disk_calls, "read_at", slow_read)
        reading = threads.submit(read, file, 0)
        assert begun.wait(20)
        writing = threads.submit(file.write, 0, memoryview(new))
        time.sleep(0.05)
        assert not writing.done()
        go_on.set()
        assert reading.result(20) == old.tobytes()
        writing.result(20)
        assert read(file, 0) == new.tobytes()


@pytest.mark.usefixtures("by_piece")
def test_closing_waits_for_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor closed too early may be another file's when the write arrives."""
    file = make(tmp_path, 8)
    begun = threading.Event()
    write_at = disk_calls.write_at

    def slow_write(fd: int, source: np.ndarray, offset: int) -> int:  # type: ignore[type-arg]
        if offset == 6 * PAGE_BYTES:  # the last piece: all are submitted
            begun.set()
        time.sleep(0.05)
        return write_at(fd, source, offset)  # EBADF if it was closed

    monkeypatch.setattr(disk_calls, "write_at", slow_write)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(file.write, 0, memoryview(aligned(8 * PAGE_BYTES)))
        assert begun.wait(20)
        file.close()
        writing.result(20)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pages=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    operations=st.lists(
        st.tuples(st.sampled_from(["read", "write"]), st.integers(0, 3)), max_size=40
    ),
    num_threads=st.integers(1, 4),
)
def test_random_interleavings(
    tmp_path: Path, pages: list[int], operations: list[tuple[str, int]], num_threads: int
) -> None:
    """Every read gives one of the values written, whole; after the last write, that one."""
    operations = [(what, index % len(pages)) for what, index in operations]
    with make(tmp_path, *pages) as file, ThreadPoolExecutor(num_threads) as threads:
        for index, num_pages in enumerate(pages):
            file.write(index, memoryview(np_filled(num_pages, 0)))

        def carry_out(number: int, what: str, index: int) -> tuple[int, int] | None:
            if what == "write":
                file.write(index, memoryview(np_filled(pages[index], number)))
                return None
            words = np.frombuffer(read(file, index), dtype=np.int64)
            assert (words == words[0]).all()
            return index, int(words[0])

        found = threads.map(
            lambda item: carry_out(*item),
            [(number, *operation) for number, operation in enumerate(operations, start=1)],
        )
        written = {(index, 0) for index in range(len(pages))} | {
            (index, number)
            for number, (what, index) in enumerate(operations, start=1)
            if what == "write"
        }
        assert all(result is None or result in written for result in found)
        # One more write of each: now the answer is known.
        for index, num_pages in enumerate(pages):
            file.write(index, memoryview(np_filled(num_pages, 1000 + index)))
        for index, num_pages in enumerate(pages):
            assert read(file, index) == np_filled(num_pages, 1000 + index).tobytes()


def np_filled(num_pages: int, number: int) -> np.ndarray:  # type: ignore[type-arg]
    memory = aligned(num_pages * PAGE_BYTES)
    memory.view(np.int64)[:] = number
    return memory


def test_a_forked_child_neither_uses_nor_deletes_the_file(tmp_path: Path) -> None:
    code = f"""
import os, sys, mmap
from pathlib import Path
from outcore.errors import StoreError
from outcore.store.ledger import Ledger
from outcore.store.scratch_directory import ScratchDirectory
from outcore.store.scratch_file import ScratchFile
directory = ScratchDirectory({str(tmp_path)!r})
file = ScratchFile(directory.path, "w", [4096], ledger=Ledger("disk", None))
page = memoryview(mmap.mmap(-1, 4096))
file.write(0, page)
pid = os.fork()
if pid == 0:
    try:
        file.read(0, page)
    except StoreError as error:
        sys.exit(0 if "forked" in str(error) else 1)  # runs what is registered for the exit
    sys.exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert file.path.exists()
file.read(0, page)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
    assert not list(tmp_path.iterdir())  # and at the parent's exit all is gone
