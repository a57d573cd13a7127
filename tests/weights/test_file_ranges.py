"""Ranges of files, read by several threads: the right bytes to the right taker, each byte once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reads_of_files import counted_reads, failing_reads
from torch import Tensor

from outcore.errors import StoreError
from outcore.weights import file_ranges
from outcore.weights.file_ranges import FileRange, read_ranges

PAGE = 1 << 12
WINDOW = 2 * PAGE
SIZE = 20 * WINDOW + 777
Files = dict[Path, bytes]


@pytest.fixture(autouse=True, params=["put", "copied"])
def _small_windows(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with takers that are handed what is read, and with memory that is filled."""
    monkeypatch.setattr(file_ranges, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(file_ranges, "_COPIED_AT_ONCE_BYTES", PAGE)
    monkeypatch.setattr(Taker, "is_memory", request.param == "copied")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("ranges")
    made = {folder / f"{i}": np.random.default_rng(i).bytes(SIZE) for i in range(2)}
    for path, data in made.items():
        path.write_bytes(data)
    return made


class Taker:
    """Takes the bytes of one range, and checks how they come."""

    is_memory = False

    def __init__(self, path: Path, start: int, end: int, granule: int = 1) -> None:
        self.bytes = torch.zeros(end - start, dtype=torch.uint8)
        self.range = FileRange(
            path=path,
            start=start,
            end=end,
            put=self.put,
            memory=self.bytes if self.is_memory else None,
            granule_bytes=granule,
            owner=self,
        )
        self._num_taken = 0
        self._lock = threading.Lock()

    def put(self, run: Tensor, first: int) -> None:
        granule, last = self.range.granule_bytes, first + run.numel()
        assert first % granule == 0
        assert last % granule == 0 or last == self.bytes.numel()
        self.bytes[first:last] = run
        with self._lock:
            self._num_taken += run.numel()

    def check(self, files: Files) -> None:
        if not self.is_memory:
            assert self._num_taken == self.bytes.numel(), "not all, or some twice"
        expected = files[self.range.path][self.range.start : self.range.end]
        assert self.bytes.numpy().tobytes() == expected


def read_and_check(takers: list[Taker], files: Files) -> None:
    yielded: list[Hashable] = []
    for owner in read_ranges([taker.range for taker in takers]):
        assert isinstance(owner, Taker)
        owner.check(files)  # it is complete when it is yielded
        yielded.append(owner)
    assert sorted(map(id, yielded)) == sorted(map(id, takers))


@pytest.mark.parametrize("step", [100, WINDOW - 1, WINDOW, 3 * WINDOW + 5, SIZE])
def test_every_byte_is_read_about_once_in_whatever_order_it_is_wanted(
    files: Files, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    takers = [Taker(p, s, min(s + step, SIZE)) for s in range(0, SIZE, step) for p in files]
    np.random.default_rng(0).shuffle(takers)  # type: ignore[arg-type]
    counts = counted_reads(monkeypatch)
    read_and_check(takers, files)
    # In small windows, a page for the overlap counts.
    assert 2 * SIZE * 0.9 < sum(counts) < 2 * SIZE * 1.2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(0, SIZE), st.integers(0, SIZE), st.integers(1, 9000)
        ),
        max_size=8,
    )
)
def test_any_ranges(files: Files, wanted: list[tuple[int, int, int, int]]) -> None:
    paths = list(files)
    takers = [Taker(paths[f], min(a, b), max(a, b), granule) for f, a, b, granule in wanted]
    read_and_check(takers, files)


def test_a_granule_that_is_larger_than_a_window(files: Files) -> None:
    read_and_check([Taker(next(iter(files)), 4095, SIZE, 3 * WINDOW + 1)], files)


def test_an_owner_of_several_ranges_is_yielded_once_after_the_last(files: Files) -> None:
    first, last = list(files)
    ends = [Taker(first, 0, 10), Taker(last, SIZE - 10, SIZE)]
    ranges = [
        FileRange(path=t.range.path, start=t.range.start, end=t.range.end, put=t.put, owner="both")
        for t in ends
    ]
    for owner in read_ranges(ranges):
        assert owner == "both"
        for taker in ends:
            taker.check(files)


def test_nothing_is_wanted() -> None:
    assert list(read_ranges([])) == []


def test_without_direct_reads(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    read_and_check([Taker(path, 5, SIZE) for path in files], files)


def test_reads_that_come_short(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda file, views, offset: preadv(file, [memoryview(views[0])[:4096]], offset),
    )
    monkeypatch.setattr(file_ranges, "read_and_copy", lambda *_, **__: 0)  # the library gives up
    read_and_check([Taker(path, 5, SIZE) for path in files], files)


# --- what goes wrong: told, and no thread and no open file is left ------------------------------


@pytest.fixture
def nothing_left() -> Iterator[None]:
    threads, num_open = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == num_open


def failing_after(num_calls: int, call: Callable[..., Any], error: Exception) -> Any:
    left = iter(range(num_calls))

    def maybe(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise error
        return call(*arguments)

    return maybe


@pytest.mark.usefixtures("nothing_left")
def test_a_file_that_ends_too_early(files: Files) -> None:
    path = next(iter(files))
    with pytest.raises(StoreError, match=f"{path} ends at byte {SIZE}") as caught:
        list(read_ranges([Taker(path, SIZE - 10, SIZE + 10).range]))
    assert caught.value.path == path


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("num_calls", [1, 7])
def test_an_error_of_the_disk(
    files: Files, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    failing_reads(monkeypatch, after=num_calls)
    path = next(iter(files))
    with pytest.raises(StoreError, match=f"{path}.*Input/output error"):
        list(read_ranges([Taker(path, 0, SIZE).range]))


@pytest.mark.usefixtures("nothing_left")
def test_an_error_of_a_taker(files: Files) -> None:
    taker = Taker(next(iter(files)), 0, SIZE)
    put = failing_after(4, taker.put, ValueError("cannot be packed"))
    range_ = FileRange(path=taker.range.path, start=0, end=SIZE, put=put)
    with pytest.raises(ValueError, match="cannot be packed"):
        list(read_ranges([range_]))


@pytest.mark.usefixtures("nothing_left")
def test_somebody_who_stops_in_the_middle(files: Files) -> None:
    path = next(iter(files))
    reading = read_ranges([Taker(path, s, s + 1000).range for s in range(0, SIZE - 1000, 1000)])
    assert next(reading) is not None
    reading.close()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nothing_left")
def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        list(read_ranges([Taker(tmp_path / "nothing", 0, 10).range]))


@pytest.mark.parametrize(
    ("owner_mib", "num_owners", "expected_mib"), [(160, 4, 8), (12, 30, 4), (1, 12, 1), (0, 1, 1)]
)
def test_buffers_take_no_more_than_two_owners(
    monkeypatch: pytest.MonkeyPatch, owner_mib: int, num_owners: int, expected_mib: int
) -> None:
    monkeypatch.setattr(file_ranges, "WINDOW_BYTES", 8 << 20)
    size = owner_mib << 20
    ranges = [
        FileRange(path=Path("a"), start=i * size, end=(i + 1) * size, put=print, owner=i)
        for i in range(num_owners)
    ]
    assert file_ranges.window_bytes(ranges) == expected_mib << 20


def test_what_goes_to_memory_is_read_before_the_rest(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is pinned while it is read, and copies to a GPU would wait for that."""
    monkeypatch.setattr(file_ranges, "NUM_THREADS", 1)
    path, num = next(iter(files)), 12
    takers = []
    for i in range(num):
        monkeypatch.setattr(Taker, "is_memory", i % 3 == 1)
        takers.append(Taker(path, i * WINDOW, (i + 1) * WINDOW))
    order = [takers.index(taker) for taker in read_ranges([taker.range for taker in takers])]
    assert order == [i for i in range(num) if i % 3 == 1] + [i for i in range(num) if i % 3 != 1]
    for taker in takers:
        assert taker.bytes.numpy().tobytes() == files[path][taker.range.start : taker.range.end]
