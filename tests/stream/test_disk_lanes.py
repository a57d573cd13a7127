"""Disk lanes: what is fetched is what was stored, with few buffers and in any order of arrival."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outcore.errors import LaneError, StoreError
from outcore.store import disk_calls
from outcore.store.ledger import Ledger
from outcore.store.scratch_file import ScratchFile, ScratchOptions
from outcore.stream.disk_lanes import DiskLanes
from outcore.stream.lanes import Fence, Lane, injected_delays
from outcore.stream.staging import StagingPool, staging_bytes

PAGE_BYTES = 4096
PAGES = (3, 1, 4, 2)
pytestmark = pytest.mark.timeout(60)


class Disk:
    """A scratch file, lanes over ``num_buffers`` buffers, and a lane of host cores for the work."""

    def __init__(self, directory: Path, num_buffers: int) -> None:
        self.file = ScratchFile(
            directory,
            "w",
            [pages * PAGE_BYTES for pages in PAGES],
            ledger=Ledger("disk", None),
            options=ScratchOptions(piece_bytes=2 * PAGE_BYTES, num_threads=2),
        )
        self.host = Ledger("host", None)
        self.staging = StagingPool(
            num_buffers, self.file.layout.largest_bytes, ledger=self.host, pin=False
        )
        self.lanes = DiskLanes(self.file, self.staging)
        self.cores = Lane("cores")

    def fill(self, record: int, value: int) -> Fence:
        buffer, free = self.lanes.blank(record)
        filled = self.cores.submit(lambda: words(buffer).fill_(value), after=[free])
        return self.lanes.store(record, buffer, after=[filled])

    def close(self) -> None:
        for lane in (self.cores, self.lanes, self.file):
            lane.close()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path, num_buffers=2) as disk:
        yield disk


def words(buffer: Tensor) -> Tensor:
    return buffer.view(torch.int64)


def fetched(disk: Disk, record: int) -> int:
    """Fetch a record, see that it is of one value all through, and release it."""
    buffer, here = disk.lanes.fetch(record)
    try:
        here.block()
        assert buffer.numel() == PAGES[record] * PAGE_BYTES
        value = int(words(buffer)[0])
        assert bool((words(buffer) == value).all())
    finally:
        disk.lanes.release(buffer, after=[])
    return value


def test_a_pool_states_its_bytes() -> None:
    ledger = Ledger("host", None)
    pool = StagingPool(3, 5000, ledger=ledger, pin=False)
    assert ledger.taken_bytes == pool.num_bytes == staging_bytes(3, 5000) == 3 * 8192
    buffers = [pool.lend([5000])[0][0] for _ in range(3)]
    assert all(buffer.data_ptr() % PAGE_BYTES == 0 for buffer in buffers)
    assert len({buffer.data_ptr() for buffer in buffers}) == 3
    with pytest.raises(ValueError, match="at least 1"):
        StagingPool(0, 5000, ledger=ledger, pin=False)


def test_records_that_travel_together_share_a_buffer() -> None:
    """Each in whole pages; it is lent again when all of it is back, after all that used it."""
    pool = StagingPool(1, 3 * PAGE_BYTES, ledger=Ledger("host", None), pin=False)
    (first, second), waits = pool.lend([100, PAGE_BYTES + 1])
    assert (first.numel(), second.numel(), waits) == (100, PAGE_BYTES + 1, [])
    assert second.data_ptr() == first.data_ptr() + PAGE_BYTES
    done = Fence(), Fence()
    pool.take_back(second, done[0])
    with pytest.raises(LaneError, match="all 1 staging buffers are in use"):
        pool.lend([100])
    pool.take_back(first, done[1])
    (again,), waits = pool.lend([3 * PAGE_BYTES])
    assert (again.data_ptr(), waits) == (first.data_ptr(), [*done])


def test_what_was_never_stored_comes_with_what_was(disk: Disk) -> None:
    disk.fill(1, 7).block()
    (stored, zeros), here = disk.lanes.fetch_all([1, 3], zeros={3})
    here.block()
    assert words(stored).unique().tolist() == [7]
    assert words(zeros).unique().tolist() == [0]
    for buffer in (stored, zeros):
        disk.lanes.release(buffer, after=[])


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_passes_over_all_records(tmp_path: Path, num_buffers: int, seed: int) -> None:
    """Read, work, write, pass after pass, as an optimizer does; never waiting in between."""
    with injected_delays(0.002, seed), Disk(tmp_path, num_buffers) as disk:
        for record in range(len(PAGES)):
            disk.fill(record, 100 * record)
        for _ in range(5):
            for record in range(len(PAGES)):
                buffer, here = disk.lanes.fetch(record)
                done = disk.cores.submit(lambda b=buffer: words(b).add_(1), after=[here])
                disk.lanes.store(record, buffer, after=[done])
        assert [fetched(disk, record) for record in range(len(PAGES))] == [5, 105, 205, 305]


@pytest.mark.usefixtures("by_piece")
def test_reads_and_writes_overlap(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one record is being written, another one arrives."""
    for record in (0, 1):
        disk.fill(record, record).block()
    writing, go_on = threading.Event(), threading.Event()
    write_at = disk_calls.write_at

    def slow_write(*arguments: object) -> int:
        writing.set()
        assert go_on.wait(20)
        return write_at(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_calls, "write_at", slow_write)
    stored = disk.fill(0, 7)
    assert writing.wait(20)
    assert fetched(disk, 1) == 1
    assert not stored.is_issued
    go_on.set()
    assert fetched(disk, 0) == 7


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["fill", "add", "look", "hold"]), st.integers(0, 3)), max_size=30
    ),
    st.integers(2, 4),
    st.integers(0, 1000),
)
def test_any_order_of_calls_gives_the_values_of_that_order(
    tmp_path: Path, calls: list[tuple[str, int]], num_buffers: int, seed: int
) -> None:
    values = dict.fromkeys(range(len(PAGES)), 0)
    seen: list[tuple[int, list[int]]] = []
    with injected_delays(0.001, seed), Disk(tmp_path, num_buffers) as disk:
        for record in values:
            disk.fill(record, 0)
        held: list[tuple[Tensor, Fence]] = []
        for number, (what, record) in enumerate(calls, start=1):
            if what == "fill":
                disk.fill(record, number)
                values[record] = number
                continue
            if what == "hold" and len(held) < num_buffers - 1:  # to be released unread
                held.append(disk.lanes.fetch(record))
                continue
            buffer, here = disk.lanes.fetch(record)
            if what == "add":
                done = disk.cores.submit(lambda b=buffer: words(b).add_(1000), after=[here])
                disk.lanes.store(record, buffer, after=[done])
                values[record] += 1000
                continue
            found: list[int] = []
            looked = disk.cores.submit(
                lambda b=buffer, f=found: f.extend(words(b).unique().tolist()), after=[here]
            )
            disk.lanes.release(buffer, after=[looked])
            seen.append((values[record], found))
            if held:
                disk.lanes.release(held.pop()[0], after=[])
        for buffer, _ in held:
            disk.lanes.release(buffer, after=[])
        assert {record: fetched(disk, record) for record in values} == values
        disk.cores.submit(lambda: None).block()
    assert all(found == [expected] for expected, found in seen)


def test_a_fetch_with_every_buffer_lent_raises(disk: Disk) -> None:
    disk.fill(0, 1)
    first, _ = disk.lanes.fetch(0)
    disk.lanes.fetch(0)
    with pytest.raises(LaneError, match="all 2 staging buffers are in use"):
        disk.lanes.fetch(0)
    with pytest.raises(LaneError, match="all 2 staging buffers are in use"):
        disk.lanes.blank(0)
    disk.lanes.release(first, after=[])
    assert fetched(disk, 0) == 1


def test_buffers_are_given_back_once(disk: Disk) -> None:
    disk.fill(0, 1)
    buffer, here = disk.lanes.fetch(0)
    with pytest.raises(ValueError, match="4096 bytes, not 12288"):
        disk.lanes.store(1, buffer, after=[here])
    disk.lanes.release(buffer, after=[here])
    with pytest.raises(ValueError, match="given back already"):
        disk.lanes.release(buffer, after=[])
    with pytest.raises(ValueError, match="no staging buffer"):
        disk.lanes.store(1, torch.zeros(PAGE_BYTES, dtype=torch.uint8), after=[])


def test_staging_must_hold_the_largest_record(disk: Disk) -> None:
    small = StagingPool(2, PAGE_BYTES, ledger=Ledger("host", None), pin=False)
    with pytest.raises(ValueError, match="too small for a record of 16384"):
        DiskLanes(disk.file, small)


def test_a_failed_read_travels_and_spoils_nothing_else(disk: Disk) -> None:
    for record in range(len(PAGES)):
        disk.fill(record, record).block()
    with open(disk.file.path, "r+b") as raw:
        raw.seek(disk.file.layout.records[2].offset)
        raw.write(b"\xff")
    for _ in range(3):  # more often than there are buffers
        buffer, here = disk.lanes.fetch(2)
        done = disk.cores.submit(lambda b=buffer: words(b).add_(1), after=[here])
        stored = disk.lanes.store(2, buffer, after=[done])
        with pytest.raises(LaneError, match="not those written") as caught:
            stored.block()
        cause = caught.value.__cause__
        assert isinstance(cause, StoreError)
        assert cause.offset == disk.file.layout.records[2].offset
    assert [fetched(disk, record) for record in (0, 1, 3)] == [0, 1, 3]
    disk.fill(2, 9)
    assert fetched(disk, 2) == 9


def test_a_buffer_whose_fetch_failed_is_not_stored(disk: Disk) -> None:
    """Even if the caller forgets to wait for the fetch."""
    disk.fill(0, 1).block()
    with open(disk.file.path, "r+b") as raw:
        raw.write(b"\xff")
    buffer, _ = disk.lanes.fetch(0)
    with pytest.raises(LaneError, match="not those written"):
        disk.lanes.store(0, buffer, after=[]).block()


def slow_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make reads wait; return the events that say that one began, and that lets all go on."""
    begun, go_on = threading.Event(), threading.Event()
    read_at = disk_calls.read_at

    def slow_read(*arguments: object) -> int:
        begun.set()
        assert go_on.wait(20)
        return read_at(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_calls, "read_at", slow_read)
    return begun, go_on


@pytest.mark.usefixtures("by_piece")
def test_a_buffer_released_early_is_not_lent_before_its_read_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Disk(tmp_path, num_buffers=1) as disk:
        disk.fill(0, 1).block()
        begun, go_on = slow_reads(monkeypatch)
        buffer, here = disk.lanes.fetch(0)
        disk.lanes.release(buffer, after=[])
        assert begun.wait(20)
        _, free = disk.lanes.blank(0)
        assert not free._issued.wait(0.1)
        go_on.set()
        free.block()
        assert here.is_done


@pytest.mark.usefixtures("by_piece")
def test_a_store_does_not_overtake_an_earlier_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Disk(tmp_path, num_buffers=3) as disk:
        disk.fill(0, 1).block()
        disk.fill(1, 5).block()
        begun, go_on = slow_reads(monkeypatch)
        other, _ = disk.lanes.fetch(1)
        older, here = disk.lanes.fetch(0)  # queued behind it
        assert begun.wait(20)
        stored = disk.fill(0, 2)
        assert not stored._issued.wait(0.1)
        go_on.set()
        here.block()
        assert words(older).unique().tolist() == [1]
        disk.lanes.release(older, after=[])
        disk.lanes.release(other, after=[])
        assert fetched(disk, 0) == 2


def test_after_failed_work_the_older_value_is_not_given_out(disk: Disk) -> None:
    disk.fill(0, 1)
    disk.fill(1, 2)
    buffer, here = disk.lanes.fetch(0)

    def fail() -> None:
        raise ArithmeticError("boom")

    failed = disk.cores.submit(fail, after=[here])
    disk.lanes.store(0, buffer, after=[failed])
    with pytest.raises(LaneError, match="boom"):
        fetched(disk, 0)
    assert fetched(disk, 1) == 2
    disk.fill(0, 3)
    assert fetched(disk, 0) == 3


def test_failed_work_does_not_free_a_buffer_that_others_still_use(disk: Disk) -> None:
    """Two users of a buffer: one fails at once, the other is still at it."""
    disk.fill(0, 1)
    disk.fill(1, 2).block()
    buffer, here = disk.lanes.fetch(0)
    go_on, slow, found = threading.Event(), Lane("slow"), []

    def fail() -> None:
        raise ArithmeticError("boom")

    def use() -> None:
        assert go_on.wait(20)
        found.extend(words(buffer).unique().tolist())

    using = slow.submit(use, after=[here])
    disk.lanes.store(0, buffer, after=[disk.cores.submit(fail), using])
    pending = [disk.lanes.fetch(1), disk.lanes.fetch(1)]  # the second one gets that buffer
    assert pending[1][0].data_ptr() == buffer.data_ptr()
    pending[0][1].block()
    assert not pending[1][1].is_issued
    go_on.set()
    pending[1][1].block()
    assert found == [1]
    slow.close()


@pytest.mark.usefixtures("by_piece")
def test_faults_at_every_io_call_travel_or_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"count": 0, "at": -1}
    for name in ("read_at", "write_at"):
        call = getattr(disk_calls, name)

        def counted(*arguments: object, call=call) -> int:  # type: ignore[no-untyped-def]
            calls["count"] += 1
            if calls["count"] == calls["at"]:
                raise OSError(5, "injected")
            return int(call(*arguments))

        monkeypatch.setattr(disk_calls, name, counted)

    def play(at: int) -> int:
        """One pass over all records, in which call ``at`` fails; return how many records failed."""
        num_failed = 0
        with Disk(tmp_path, num_buffers=2) as disk:
            calls.update(count=0, at=at)
            for record in range(len(PAGES)):
                disk.fill(record, record)
            for record in range(len(PAGES)):
                buffer, here = disk.lanes.fetch(record)
                done = disk.cores.submit(lambda b=buffer: words(b).add_(10), after=[here])
                disk.lanes.store(record, buffer, after=[done])
            for record in range(len(PAGES)):
                try:
                    assert fetched(disk, record) == record + 10
                except LaneError:
                    num_failed += 1
        return num_failed

    assert play(at=-1) == 0
    num_calls = calls["count"]
    assert num_calls >= 18
    assert {play(at) for at in range(1, num_calls + 1)} == {1}


def test_closing_with_work_in_the_queue(tmp_path: Path) -> None:
    disk = Disk(tmp_path, num_buffers=2)
    disk.fill(0, 1).block()
    blocked = Fence()
    buffer, here = disk.lanes.fetch(0)
    here.block()
    stored = disk.lanes.store(0, buffer, after=[blocked])
    blocked.mark_issued()
    disk.close()
    with pytest.raises(LaneError, match="closed"):
        disk.lanes.fetch(0)
    assert stored.is_issued
