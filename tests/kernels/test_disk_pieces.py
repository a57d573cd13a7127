"""Records that the library moves: right bytes, right checksums, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outcore.kernels import disk_pieces
from outcore.kernels.checksum import PAGE_BYTES, Bytes, checksum_pages
from outcore.kernels.disk_pieces import Moved, Part, read_parts, write_parts

pytestmark = pytest.mark.usefixtures("needs_library")

PAGES = (1, 5, 8, 3)
SEEDS = (0, 1, 2**64 - 1, 2**70 + 3)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "records", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def some_parts() -> list[Part]:
    """Parts in another order than in memory, with holes between them."""
    noise = np.random.default_rng(0)
    return [
        Part(
            memory=noise.integers(0, 256, pages * PAGE_BYTES, dtype=np.uint8),
            offset=(len(PAGES) - i) * 16 * PAGE_BYTES,
            seed=SEEDS[i],
        )
        for i, pages in enumerate(PAGES)
    ]


def blank(parts: list[Part]) -> list[Part]:
    return [
        Part(memory=np.zeros_like(part.memory), offset=part.offset, seed=part.seed)
        for part in parts
    ]


def sums(parts: list[Part]) -> list[int]:
    return [checksum_pages(part.memory, seed=part.seed) for part in parts]


@pytest.mark.parametrize("threads", [1, 3, 1000])
@pytest.mark.parametrize("piece_pages", [1, 2, 3, 100])
def test_comes_back_as_written(fd: int, threads: int, piece_pages: int) -> None:
    parts = some_parts()
    piece_bytes = piece_pages * PAGE_BYTES
    moved = write_parts(fd, parts, piece_bytes=piece_bytes, threads=threads)
    assert moved == [Moved(checksum=checksum, left=[]) for checksum in sums(parts)]
    for part in parts:
        assert os.pread(fd, part.memory.size, part.offset) == part.memory.tobytes()
    found = blank(parts)
    assert read_parts(fd, found, piece_bytes=piece_bytes, threads=threads) == moved
    assert all(np.array_equal(a.memory, b.memory) for a, b in zip(found, parts, strict=True))


def test_nothing_to_move(fd: int) -> None:
    empty: Bytes = np.zeros(0, dtype=np.uint8)
    assert read_parts(fd, [], piece_bytes=PAGE_BYTES, threads=2) == []
    nothing = [Part(memory=empty, offset=0, seed=1)]
    assert write_parts(fd, nothing, piece_bytes=PAGE_BYTES, threads=2) == [
        Moved(checksum=0, left=[])
    ]


def test_a_piece_that_comes_in_part_is_left_and_not_summed(fd: int) -> None:
    (part, *_) = parts = some_parts()[1:2]
    write_parts(fd, parts, piece_bytes=PAGE_BYTES, threads=1)
    os.ftruncate(fd, part.offset + 2 * PAGE_BYTES + 100)
    (moved,) = read_parts(fd, blank(parts), piece_bytes=PAGE_BYTES, threads=1)
    assert moved.left == [2 * PAGE_BYTES, 3 * PAGE_BYTES, 4 * PAGE_BYTES]
    assert moved.checksum == checksum_pages(part.memory[: 2 * PAGE_BYTES], seed=part.seed)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_descriptor_that_is_none(threads: int) -> None:
    parts = some_parts()
    for call in (read_parts, write_parts):
        for part, moved in zip(
            parts, call(-1, parts, piece_bytes=2 * PAGE_BYTES, threads=threads), strict=True
        ):
            starts = list(range(0, part.memory.size, 2 * PAGE_BYTES))
            assert moved == Moved(checksum=0, left=starts)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(bytes(PAGE_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    part = Part(memory=np.ones(PAGE_BYTES, dtype=np.uint8), offset=0, seed=0)
    (moved,) = write_parts(descriptor, [part], piece_bytes=PAGE_BYTES, threads=1)
    os.close(descriptor)
    assert moved.left == [0]
    assert path.read_bytes() == bytes(PAGE_BYTES)


def test_without_a_library_all_is_left(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pieces, "library", lambda: None)
    parts = some_parts()
    for call in (read_parts, write_parts):
        for part, moved in zip(
            parts, call(fd, parts, piece_bytes=PAGE_BYTES, threads=2), strict=True
        ):
            assert moved == Moved(checksum=0, left=list(range(0, part.memory.size, PAGE_BYTES)))
    assert os.fstat(fd).st_size == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"piece_bytes": 100}, "whole pages"),
        ({"piece_bytes": PAGE_BYTES, "threads": 0}, "threads"),
        ({"offset": -PAGE_BYTES}, "size"),
        ({"size": 100}, "whole pages"),
    ],
)
def test_what_makes_no_sense_is_refused(fd: int, changes: dict[str, int], words: str) -> None:
    memory: Bytes = np.zeros(changes.pop("size", PAGE_BYTES), dtype=np.uint8)
    part = Part(memory=memory, offset=changes.pop("offset", 0), seed=0)
    options = {"piece_bytes": PAGE_BYTES, "threads": 2, **changes}
    with pytest.raises(RuntimeError, match=words):
        write_parts(fd, [part], **options)
    assert os.fstat(fd).st_size == 0
