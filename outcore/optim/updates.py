"""Chunk updates: the unit of optimizer work, and the queue that two updaters share.

A unit's trainable prefix is cut into chunks. Host cores and the visitor (see visitor.py) take
chunks from one queue in the order in which the next forward needs them; AdamW is element-wise and
has the same bits everywhere, so who takes which chunk never shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outcore.kernels import AdamWScalars
from outcore.optim.state import UnitState
from outcore.optim.state_format import Rounding
from outcore.store.spans import ALIGN_ELEMENTS
from outcore.stream.lanes import Fence, forget_locals
from outcore.stream.unit import Unit

Arrival = tuple[int, int]
"""Of a gradient that arrives in one piece: the unit's index and the first element."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Elements [start, end) of a unit's trainable prefix.

    ``delivery`` is the first element of the gradient that it arrives with: a block's gradient
    arrives whole, an embedding's parameter by parameter.
    """

    unit: Unit
    delivery: int
    start: int
    end: int

    @property
    def key(self) -> tuple[int, int]:
        return self.unit.index, self.start

    @property
    def arrival(self) -> Arrival:
        return self.unit.index, self.delivery

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of elements of a unit that are updated alike.

    ``group`` is their param group; ``missed`` are steps of the unit in which they rested.
    """

    start: int
    end: int
    group: int
    missed: int = 0


@dataclass(kw_only=True, eq=False)
class ChunkUpdate:
    """One chunk's AdamW step: where its gradient is, what to wait for, and its done-marks.

    ``weight_ready`` is passed when the new weights are where the forward takes them from, ``done``
    when all of the state is where the next update finds it.
    """

    chunk: Chunk
    state: UnitState
    segments: Sequence[Segment]
    scalars: Sequence[AdamWScalars]  # by segment
    rounding: Rounding
    gradient: Callable[[], Tensor]  # the chunk's gradient, valid after the fences
    after: Sequence[Fence]
    on_read: Callable[[Fence | None], None] | None = None  # the gradient has been read, after this
    weight_ready: Fence = field(default_factory=Fence)
    done: Fence = field(default_factory=Fence)
    _is_ready: bool = False

    @property
    def label(self) -> str:
        return f"update {self.chunk.unit.name}"

    @property
    def is_ready(self) -> bool:
        """Whether the gradient has arrived; asked often, so the answer yes is remembered."""
        self._is_ready = self._is_ready or all(fence.is_done for fence in self.after)
        return self._is_ready

    def apply(self, tensors: Sequence[Tensor], gradient: Tensor) -> None:
        """Run AdamW over ``tensors`` (UnitState.tensors() cut to the chunk), wherever they are."""
        for segment, scalars in zip(self.segments, self.scalars, strict=True):
            start = max(segment.start, self.chunk.start) - self.chunk.start
            end = min(segment.end, self.chunk.end) - self.chunk.start
            if start >= end:
                continue
            self.state.format.update_(
                self.state.format.cut(tensors, start, end),
                gradient[start:end],
                scalars,
                self.rounding,
                self.chunk.unit.first_element + self.chunk.start + start,
            )

    def home_tensors(self) -> list[Tensor]:
        return self.state.cut(self.chunk.start, self.chunk.end)

    def fail(self, error: BaseException) -> None:
        forget_locals(error)
        for fence in (self.weight_ready, self.done):
            fence.error = error
            fence.mark_issued()
        self.gradient_read(None)

    def gradient_read(self, fence: Fence | None) -> None:
        """Say that the gradient's memory is free, or free after ``fence``; once is enough."""
        on_read, self.on_read = self.on_read, None
        if on_read is not None:
            on_read(fence)


def chunks_of(units: Sequence[Unit], max_numel: int, max_piece_numel: int) -> list[Chunk]:
    """Cut what arrives together into chunks of about equal size.

    ``max_piece_numel``: the most elements of a chunk on disk.
    """
    chunks = []
    for unit in units:
        if unit.arrives_whole:
            deliveries = [(0, unit.layout.trainable_numel)]
        else:
            deliveries = [(field.offset, field.end) for field in unit.layout.trainable]
        for first, last in deliveries:
            if unit.is_on_disk:
                size = unit.piece_numel(max_piece_numel)
            else:
                pieces = max(1, -(-(last - first) // max_numel))
                size = -(-(last - first) // pieces)
                size = -(-size // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
            chunks += [
                Chunk(unit=unit, delivery=first, start=start, end=min(start + size, last))
                for start in range(first, last, size)
            ]
    return chunks


class UpdateQueue:
    """Updates waiting for an updater."""

    def __init__(self) -> None:
        self._waiting: list[ChunkUpdate] = []
        self._last: dict[tuple[int, int], tuple[Fence, Fence]] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False

    def push(self, updates: Sequence[ChunkUpdate]) -> None:
        with self._changed:
            for update in updates:
                # Two updates of one chunk keep their order.
                update.after = [*update.after, *self._last.get(update.chunk.key, ())]
                self._last[update.chunk.key] = update.done, update.weight_ready
            self._waiting += updates
            self._changed.notify_all()
        if self._error is not None:
            self.break_off(self._error)

    def break_off(self, error: BaseException) -> None:
        """Fail what waits and what will come: an updater has ended."""
        with self._changed:
            self._error = error
            left, self._waiting = self._waiting, []
        for update in left:
            update.fail(error)

    def last_update(self, chunk: Chunk) -> list[Fence]:
        """Return what to wait for before anyone else takes the chunk's state."""
        with self._changed:
            return list(self._last.get(chunk.key, ()))

    def take(self, *, min_backlog: int) -> ChunkUpdate | None:
        """Return the next update, waiting for one; None when closed.

        One is admitted while the gradients of at least ``min_backlog`` of them have arrived (of
        two, for units that the next forward begins with); with 0, always.
        """
        with self._changed:
            while not self._closed:
                update = self._next(min_backlog)
                if update is not None:
                    self._waiting.remove(update)
                    self._changed.notify_all()  # whoever waits for a backlog looks again
                    return update
                self._changed.wait()
            return None

    def synchronize(self) -> None:
        """Wait until every update that was pushed is done."""
        with self._changed:
            fences = [done for done, _ in self._last.values()]
        for fence in fences:
            fence.block()

    def close(self) -> list[ChunkUpdate]:
        """Wake every updater with nothing to do; return the updates that nobody took."""
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, []
            self._changed.notify_all()
            return left

    def _next(self, min_backlog: int) -> ChunkUpdate | None:
        if not self._waiting:
            return None
        # What the next forward needs first goes first, if its gradient is there; during a backward
        # that leaves the last blocks, which came first, for the time of the next forward.
        ready = [update for update in self._waiting if update.is_ready]
        first = min(ready, key=lambda u: u.chunk.key, default=self._waiting[0])
        if first.chunk.unit.is_urgent:
            min_backlog = min(min_backlog, 2)
        return first if len(ready) >= min_backlog else None
