"""Chunks tile the trainable prefix; the queue hands each update to one updater, in order."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outcore.blocks import Part
from outcore.optim.state import UnitState
from outcore.optim.state_format import Rounding, state_format
from outcore.optim.updates import Chunk, ChunkUpdate, UpdateQueue, chunks_of
from outcore.store.spans import ALIGN_ELEMENTS, SpanLayout
from outcore.stream.unit import Unit


def make_unit(index: int, sizes: list[tuple[int, bool]], arrives_whole: bool) -> Unit:
    parameters = {
        f"p{i}": nn.Parameter(torch.zeros(size), requires_grad=trainable)
        for i, (size, trainable) in enumerate(sizes)
    }
    return Unit(
        index=index,
        is_urgent=index <= 1,
        part=Part(name=f"u{index}", module=nn.Module(), parameters=parameters, is_block=False),
        arrives_whole=arrives_whole,
        layout=SpanLayout.of(parameters),
        dtype=torch.float32,
    )


fields = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=5)
units_of = st.lists(st.tuples(fields, st.booleans()), min_size=1, max_size=4).map(
    lambda entries: [make_unit(i, sizes, whole) for i, (sizes, whole) in enumerate(entries)]
)


@given(units_of, st.integers(128, 4096))
def test_chunks_tile_the_trainable_prefix(units: list[Unit], max_numel: int) -> None:
    trained = [unit for unit in units if unit.layout.trainable_numel]
    chunks = chunks_of(trained, max_numel, max_numel)
    assert [c.unit.index for c in chunks] == sorted(c.unit.index for c in chunks)
    assert len({c.key for c in chunks}) == len(chunks)
    for unit in trained:
        covered = torch.zeros(unit.layout.trainable_numel, dtype=torch.int)
        for chunk in (c for c in chunks if c.unit is unit):
            assert 0 < chunk.numel <= -(-max_numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
            assert chunk.start % ALIGN_ELEMENTS == 0
            covered[chunk.start : chunk.end] += 1
            if unit.arrives_whole:
                assert chunk.delivery == 0
            else:
                (field,) = (f for f in unit.layout.trainable if f.offset == chunk.delivery)
                assert field.offset <= chunk.start
                assert chunk.end <= field.end
        assert int(covered.max()) == 1
        for field in unit.layout.trainable:
            assert bool((covered[field.offset : field.end] == 1).all()), field


def an_update(chunk: Chunk) -> ChunkUpdate:
    numel = chunk.unit.layout.trainable_numel
    flat = torch.zeros(numel)
    fp32 = state_format("fp32", torch.float32)
    return ChunkUpdate(
        chunk=chunk,
        state=UnitState(format=fp32, weight=flat, rest=(flat, flat)),
        segments=[],
        scalars=[],
        rounding=Rounding(seed=0, step=1),
        gradient=lambda: flat,
        after=[],
    )


@pytest.fixture
def chunks() -> list[Chunk]:
    return chunks_of([make_unit(i, [(600, True)], True) for i in range(4)], 256, 256)


def drain(queue: UpdateQueue, **admits: object) -> list[tuple[int, int]]:
    """Take everything that may be taken, then close."""
    taken: list[tuple[int, int]] = []

    def run() -> None:
        while (update := queue.take(**admits)) is not None:  # type: ignore[arg-type]
            taken.append(update.chunk.key)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 5
    while queue._waiting and time.monotonic() < deadline:
        size = len(taken)
        time.sleep(0.02)
        if len(taken) == size:
            break
    queue.close()
    thread.join(5)
    assert not thread.is_alive()
    return taken


def test_updates_are_taken_in_order(chunks: list[Chunk]) -> None:
    queue = UpdateQueue()
    queue.push([an_update(c) for c in chunks])
    assert drain(queue, min_backlog=1) == [c.key for c in chunks]


def test_a_helper_takes_only_from_a_backlog(chunks: list[Chunk]) -> None:
    queue = UpdateQueue()
    late = [an_update(c) for c in chunks if c.unit.index > 1]
    assert len(late) == 6
    queue.push(late)
    assert len(drain(queue, min_backlog=4)) == 3  # then fewer than four are left
    queue = UpdateQueue()
    urgent = [an_update(c) for c in chunks if c.unit.index <= 1]
    queue.push(urgent)
    assert len(drain(queue, min_backlog=4)) == 5


def test_two_updates_of_a_chunk_keep_their_order(chunks: list[Chunk]) -> None:
    queue = UpdateQueue()
    first, second = an_update(chunks[0]), an_update(chunks[0])
    queue.push([first])
    queue.push([second])
    assert first.done in second.after
    taken = queue.take(min_backlog=1)
    assert taken is first
    queue.take(min_backlog=0)
    assert queue.last_update(chunks[0]) == [second.done, second.weight_ready]
    assert queue.last_update(chunks[1]) == []
    queue.close()


def test_what_nobody_took_is_returned_on_closing(chunks: list[Chunk]) -> None:
    queue = UpdateQueue()
    updates = [an_update(c) for c in chunks]
    queue.push(updates)
    assert queue.close() == updates
    assert queue.take(min_backlog=1) is None


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 6))
def test_each_update_is_taken_once(num_updaters: int) -> None:
    chunks = chunks_of([make_unit(i, [(900, True)], True) for i in range(5)], 128, 128)
    queue = UpdateQueue()
    taken: list[tuple[int, int]] = []

    def run() -> None:
        while (update := queue.take(min_backlog=1)) is not None:
            taken.append(update.chunk.key)
            update.done.mark_issued()

    threads = [threading.Thread(target=run) for _ in range(num_updaters)]
    for thread in threads:
        thread.start()
    queue.push([an_update(c) for c in chunks])
    queue.synchronize()
    queue.close()
    for thread in threads:
        thread.join(5)
    assert sorted(taken) == sorted(c.key for c in chunks)
