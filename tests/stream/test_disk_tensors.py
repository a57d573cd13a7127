"""Tensors on disk: pieces and the mapped view show the same values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cufile_on_host import CufileOnHost

from outcore.errors import LaneError, StoreError
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger
from outcore.stream.disk_tensors import (
    PIECE_ALIGN,
    DiskShape,
    DiskTensors,
    copy_from_disk,
    set_aside,
    store_together,
)
from outcore.stream.lanes import Fence
from outcore.stream.staging import Guest

SHAPES = [
    DiskShape(numel=2 * PIECE_ALIGN + 384, dtype=torch.float32, piece_numel=PIECE_ALIGN),
    DiskShape(numel=1000, dtype=torch.bfloat16, piece_numel=1000),
    DiskShape(numel=3 * PIECE_ALIGN, dtype=torch.uint8, piece_numel=PIECE_ALIGN),
]


def make(folder: Path, *, to_device: bool = False) -> DiskTensors:
    return DiskTensors(
        folder,
        "tensors",
        SHAPES,
        num_buffers=3,
        disk_ledger=Ledger("disk", None),
        host_ledger=Ledger("host", None),
        pin=False,
        to_device=to_device,
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTensors]:
    disk = make(tmp_path)
    yield disk
    disk.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_never_written_is_zero(disk: DiskTensors) -> None:
    for tensor in disk.tensors:
        assert not bool(tensor.mapped.any())
        for piece in range(tensor.shape.num_pieces):
            values, here = tensor.fetch(piece)
            here.block()
            assert not bool(values.any())
            tensor.release(values, [])


def test_what_is_set_aside_waits_there_until_it_is_stored(
    disk: DiskTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = disk.tensors[0]
    num_bytes = tensor.shape.piece_bytes
    arena = HostArena(num_bytes, purpose="guest", ledger=Ledger("host", None), pin=False)
    guest = Guest(memory=arena.span(num_bytes, torch.uint8).fill_(255))
    values, here = tensor.fetch(1)
    here.block()
    expected = values.copy_(torch.randn(values.shape)).clone()
    release = disk._lanes.release

    def to_somebody_else(buffer: torch.Tensor, after: list[Fence]) -> None:
        buffer.fill_(1)  # it may be read into at once
        release(buffer, after)

    monkeypatch.setattr(disk._lanes, "release", to_somebody_else)
    (aside,) = set_aside([(tensor, values)], 1, guest)
    assert aside.data_ptr() == guest.memory.data_ptr()
    assert torch.equal(aside, expected)
    others = [tensor.fetch(piece) for piece in (0, 2, 0)]  # every buffer is there again
    for other, arrived in others:
        arrived.block()
        tensor.release(other, [])
    assert not guest.free.is_issued
    store_together([(tensor, aside)], 1, []).block()
    guest.free.block()
    found, here = tensor.fetch(1)
    here.block()
    assert torch.equal(found, expected)
    tensor.release(found, [])


def test_zeros_that_nobody_waited_for_come_before_the_next_value(disk: DiskTensors) -> None:
    """An update that failed gives its buffers back at once, when they may not be filled yet."""
    (tensor, _, _), begin = disk.tensors, threading.Event()
    for lane in disk._lanes.reads:
        lane.submit(lambda: begin.wait(10) and None)
    for piece in range(3):  # every buffer
        values, _ = tensor.fetch(piece)
        tensor.release(values, [])
    threading.Timer(0.1, begin.set).start()
    buffer, free = disk.blank(0)
    free.block()
    buffer.fill_(7)
    begin.wait(10)
    for lane in disk._lanes.reads:
        lane.submit(lambda: None).block()
    assert bool((buffer == 7).all())
    disk.release(buffer, [])


def test_updates_in_pieces_show_in_the_mapped_view(disk: DiskTensors) -> None:
    expected = [torch.zeros(s.numel, dtype=s.dtype) for s in SHAPES]
    for step in range(3):
        for tensor, whole in zip(disk.tensors, expected, strict=True):
            for piece in range(tensor.shape.num_pieces):
                start, end = tensor.shape.bounds(piece)
                values, here = tensor.fetch(piece)
                here.block()
                assert torch.equal(values, whole[start:end])
                whole[start:end] += step + piece + 1
                values += step + piece + 1
                store_together([(tensor, values)], piece, []).block()
            assert torch.equal(tensor.mapped, whole)


def test_writes_to_the_mapped_view_are_taken_over(disk: DiskTensors) -> None:
    for tensor in disk.tensors:
        tensor.write(torch.ones(tensor.shape.numel, dtype=tensor.shape.dtype))
        tensor.mapped.add_(1)
        tensor.rewrite()
        values, here = tensor.fetch(tensor.shape.num_pieces - 1)
        here.block()
        assert bool((values == 2).all())
        tensor.release(values, [])


def test_a_write_behind_our_back_is_noticed(disk: DiskTensors) -> None:
    tensor = disk.tensors[0]
    tensor.write(torch.ones(tensor.shape.numel))
    tensor.mapped[5] = 3.0
    values, here = tensor.fetch(0)
    with pytest.raises(LaneError, match="checksum"):
        here.block()
    tensor.release(values, [])


def test_past_the_host_come_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cufile = CufileOnHost(monkeypatch)
    disk = make(tmp_path, to_device=True)
    for tensor in disk.tensors:
        target = torch.ones(tensor.shape.numel, dtype=tensor.shape.dtype)
        copy_from_disk(tensor, target, torch.device("cpu"))
        assert not bool(target.any()), "what was never written is zero"
        for seed in range(2):
            values = torch.randint(0, 100, target.shape).to(target.dtype)
            tensor.write(values)
            copy_from_disk(tensor, target, torch.device("cpu"))
            assert torch.equal(target, values), seed
    disk.close()
    assert cufile.num_reads >= 2 * sum(shape.num_pieces for shape in SHAPES) - 2


def test_past_the_host_a_failed_piece_is_raised_when_all_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(read: bytearray, offset: int) -> int:
        if offset == 0:
            read[5] ^= 1
        return len(read)

    cufile = CufileOnHost(monkeypatch)
    disk = make(tmp_path, to_device=True)
    tensor = disk.tensors[0]
    tensor.write(torch.ones(tensor.shape.numel))
    target = torch.zeros(tensor.shape.numel)
    cufile.damage = flip
    with pytest.raises(StoreError, match="not those written"):
        copy_from_disk(tensor, target, torch.device("cpu"))
    assert bool(target[PIECE_ALIGN : 2 * PIECE_ALIGN].all()), "a piece came after the error"
    disk.close()


def test_a_write_that_is_interrupted_keeps_no_buffer(disk: DiskTensors) -> None:
    tensor = disk.tensors[1]
    for _ in range(4):  # more often than there are buffers
        with pytest.raises(RuntimeError, match="size"):
            tensor.write(torch.ones(7, dtype=torch.bfloat16))
    tensor.write(torch.ones(1000, dtype=torch.bfloat16))
    assert bool((tensor.mapped == 1).all())
