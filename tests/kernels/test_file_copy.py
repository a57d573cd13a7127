"""Bytes that the library reads and hands out: the right ones, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outcore.kernels import file_copy
from outcore.kernels.file_copy import CopyRun, read_and_copy

pytestmark = pytest.mark.usefixtures("needs_library")

PAGE_BYTES = 4096
SIZE = 5 * PAGE_BYTES + 123
DATA = np.random.default_rng(0).bytes(SIZE)


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("copied") / "file"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def buffer_of(pages: int) -> Tensor:
    return torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8)


def blank(num_bytes: int) -> Tensor:
    return torch.full((num_bytes,), 7, dtype=torch.uint8)


@settings(max_examples=100, deadline=None)
@given(
    offset=st.integers(0, SIZE),
    share=st.floats(0, 1),
    cuts=st.lists(st.floats(0, 1), max_size=7),
    pages=st.integers(1, 7),
)
def test_every_run_gets_its_bytes_and_nothing_else_is_touched(
    fd: int, offset: int, share: float, cuts: list[float], pages: int
) -> None:
    num_bytes = round(share * (SIZE - offset))
    bounds = sorted({round(cut * num_bytes) for cut in cuts})
    pairs = list(pairwise(bounds))[::2]  # with holes between them
    memories = [blank(end - start + 2) for start, end in pairs]
    runs = [
        CopyRun(start=start, memory=memory[1:-1])
        for (start, _), memory in zip(pairs, memories, strict=True)
    ]
    found = read_and_copy(fd, offset, num_bytes, buffer=buffer_of(pages), runs=runs[::-1])
    assert found == num_bytes
    for (start, end), memory in zip(pairs, memories, strict=True):
        assert memory[1:-1].numpy().tobytes() == DATA[offset + start : offset + end]
        assert (memory[0], memory[-1]) == (7, 7)


def test_values_of_several_bytes_each(fd: int) -> None:
    memory = torch.zeros(100, dtype=torch.int32)
    runs = [CopyRun(start=3, memory=memory)]
    assert read_and_copy(fd, 0, 403, buffer=buffer_of(1), runs=runs) == 403
    assert memory.numpy().tobytes() == DATA[3:403]


def test_a_file_that_is_cut_is_handed_out_up_to_the_piece_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(DATA[: 3 * PAGE_BYTES + 50])
    memory = blank(SIZE)
    with path.open("rb") as file:
        runs = [CopyRun(start=0, memory=memory)]
        done = read_and_copy(file.fileno(), 0, SIZE, buffer=buffer_of(2), runs=runs)
    assert done == 2 * PAGE_BYTES
    assert memory[:done].numpy().tobytes() == DATA[:done]
    assert bool((memory[done:] == 7).all())


def test_what_cannot_be_read_is_left(tmp_path: Path) -> None:
    written = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    for descriptor in (-1, written):
        memory = blank(10)
        runs = [CopyRun(start=0, memory=memory)]
        assert read_and_copy(descriptor, 0, 10, buffer=buffer_of(1), runs=runs) == 0
        assert bool((memory == 7).all())
    os.close(written)


def test_without_a_library_all_is_left(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_copy, "library", lambda: None)
    runs = [CopyRun(start=0, memory=blank(10))]
    assert read_and_copy(fd, 0, 10, buffer=buffer_of(1), runs=runs) == 0


@pytest.mark.parametrize(
    ("offset", "num_bytes", "start", "buffer_bytes"),
    [(-1, 10, 0, PAGE_BYTES), (0, 10, -1, PAGE_BYTES), (0, 10, 6, PAGE_BYTES), (0, 10, 0, 100)],
)
def test_what_makes_no_sense_is_refused(
    fd: int, offset: int, num_bytes: int, start: int, buffer_bytes: int
) -> None:
    buffer = torch.zeros(buffer_bytes, dtype=torch.uint8)
    runs = [CopyRun(start=start, memory=blank(5))]
    with pytest.raises(RuntimeError, match="size"):
        read_and_copy(fd, offset, num_bytes, buffer=buffer, runs=runs)
