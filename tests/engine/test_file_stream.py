"""Ranges of a file through a ring of buffers: the right bytes, in any order."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.engine import file_stream
from outcore.engine.file_stream import FileStream
from outcore.errors import StoreError

PIECE = 1 << 13
SIZE = 20 * PIECE + 777


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_stream, "PIECE_BYTES", PIECE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("stream") / "file"
    data = np.random.default_rng(0).bytes(SIZE)
    path.write_bytes(data)
    return path, data


def read(stream: FileStream, start: int, end: int) -> bytes:
    target = torch.empty(end - start, dtype=torch.uint8)
    stream.read(target, start)
    return target.numpy().tobytes()


@pytest.mark.parametrize("step", [1, 100, PIECE - 1, PIECE, 3 * PIECE + 5, SIZE])
def test_one_range_behind_the_other(file: tuple[Path, bytes], step: int) -> None:
    path, data = file
    stream = FileStream(path)
    first = 0 if step > 1 else SIZE - 50
    found = [read(stream, s, min(s + step, SIZE)) for s in range(first, SIZE, step)]
    stream.close()
    assert b"".join(found) == data[first:]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8))
def test_ranges_in_any_order(file: tuple[Path, bytes], ranges: list[tuple[int, int]]) -> None:
    path, data = file
    stream = FileStream(path)
    for pair in ranges:
        start, end = sorted(pair)
        assert read(stream, start, end) == data[start:end]
    stream.close()


def test_a_file_that_ends_too_early(file: tuple[Path, bytes]) -> None:
    stream = FileStream(file[0])
    with pytest.raises(StoreError, match=f"ends at byte {SIZE}"):
        read(stream, SIZE - 10, SIZE + 10)
    stream.close()


def test_without_direct_reads(file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    stream = FileStream(file[0])
    assert read(stream, 5, SIZE) == file[1][5:]
    stream.close()


def test_an_error_of_the_disk(file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FileStream(file[0])

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        read(stream, 0, 100)
    stream.close()


def test_no_thread_is_left(file: tuple[Path, bytes]) -> None:
    before = set(threading.enumerate())
    stream = FileStream(file[0])
    read(stream, 0, 100)
    stream.close()
    assert set(threading.enumerate()) == before


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        FileStream(tmp_path / "nothing")
