"""The visitor: optimizer state that visits the device over the link, is updated there, goes home.

While a step with clipping waits for its last gradient the link is idle: the visitor then already
holds the state of the first chunks that the next forward needs, so that the forward starts at
once. After them it shares the queue with the host's cores. The home of the state stays the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outcore.optim.state import UnitState
from outcore.optim.updates import Chunk, ChunkUpdate, UpdateQueue
from outcore.stream.lanes import Fence, Lane

# Chunks that wait before the visitor helps the host with them: the host moves fewer bytes for the
# same work, so the link gets only what the host cannot keep up with.
_MIN_BACKLOG = 8


@dataclass(kw_only=True, eq=False)
class _Visit:
    """Device buffers for one chunk's state and gradient."""

    buffers: list[Tensor]
    gradient: Tensor
    free: Fence | None = None  # the last copy home out of these buffers
    staged: Fence | None = None
    generation: int = 0


def visit_bytes(state: UnitState, numel: int, gradient_dtype: torch.dtype) -> int:
    """Return the device bytes of one visit of ``numel`` elements."""
    return numel * (sum(t.itemsize for t in state.tensors()) + gradient_dtype.itemsize)


class Visitor:
    """One thread that conducts two lanes: state in (and the update itself), state out."""

    def __init__(
        self,
        queue: UpdateQueue,
        schedule: Sequence[tuple[Chunk, UnitState]],
        *,
        num_visits: int,
        device: torch.device,
        gradient_dtype: torch.dtype,
    ) -> None:
        """``schedule``: every chunk in the order in which a forward needs it."""
        self.num_updated = 0  # elements, since the start
        self._queue = queue
        self._schedule = schedule
        numel = max(chunk.numel for chunk, _ in schedule)
        dtypes = [t.dtype for t in schedule[0][1].tensors()]
        self._idle = [
            _Visit(
                buffers=[torch.empty(numel, dtype=dtype, device=device) for dtype in dtypes],
                gradient=torch.empty(numel, dtype=gradient_dtype, device=device),
            )
            for _ in range(num_visits)
        ]
        # Their memory may still be in use under its last owner, on the compute stream.
        allocated = Fence.after_compute(device)
        for visit in self._idle:
            visit.free = allocated
        # Some stay free, to help the host with chunks that are not staged.
        self._num_helping = min(2, num_visits // 2)
        self._staged: dict[tuple[int, int], _Visit] = {}
        self._generation = 0
        self._lane_in = Lane("visit-in", device)
        self._lane_out = Lane("visit-out", device)
        self._thread = threading.Thread(
            target=_conduct_visits,
            args=(weakref.ref(self), queue),
            name="outcore-visitor",
            daemon=True,
        )
        self._thread.start()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        self._lane_in.close()
        self._lane_out.close()

    def forget_staged(self) -> None:
        """Say that homes were written from outside; what is staged must be brought in again."""
        self._generation += 1

    def gradient_buffer(self, chunk: Chunk) -> tuple[Tensor, list[Fence]] | None:
        """Return where a staged chunk's gradient may be put on the device, and after what.

        The gradient then need not go to the host and back. None if the chunk is not staged.
        """
        visit = self._staged.get(chunk.key)
        if visit is None:
            return None
        return visit.gradient[: chunk.numel], [visit.free] if visit.free is not None else []

    def _run_one(self, update: ChunkUpdate) -> None:
        try:
            self._conduct(update)
        except BaseException as error:
            update.fail(error)

    def _can_stage(self) -> bool:
        return len(self._idle) > self._num_helping and len(self._staged) < len(self._schedule)

    def _admitted_backlog(self) -> int | None:
        """Return how many chunks must wait before one that is not staged may be taken.

        Waiting for free buffers here, not on the lane, leaves the rest of the queue to the host.
        """
        if not self._idle:
            return None
        if self._idle[0].free is not None:
            self._idle[0].free.block()
        return _MIN_BACKLOG

    def _conduct(self, update: ChunkUpdate) -> None:
        chunk = update.chunk
        for fence in update.after:
            fence.block()
        visit = self._staged.pop(chunk.key, None)
        if visit is None:
            visit = self._idle.pop(0)
            self._stage(visit, update.home_tensors(), after=())
        elif visit.generation != self._generation:
            self._stage(visit, update.home_tensors(), after=())
        self._idle.append(visit)
        buffers = [buffer[: chunk.numel] for buffer in visit.buffers]
        gradient = visit.gradient[: chunk.numel]

        home = update.home_tensors()
        resident = chunk.unit.device_weight

        def bring_gradient_and_update() -> None:
            arrived = update.gradient()
            if arrived.data_ptr() != gradient.data_ptr():
                gradient.copy_(arrived, non_blocking=True)
            update.apply(buffers, gradient)
            if resident is not None:
                resident[chunk.start : chunk.end].copy_(buffers[0])

        def weight_home() -> None:
            home[0].copy_(buffers[0], non_blocking=True)

        def rest_home() -> None:
            for place, buffer in zip(home[1:], buffers[1:], strict=True):
                place.copy_(buffer, non_blocking=True)

        assert visit.staged is not None
        # The forward waits for resident weights, or for streamed ones to be home; never for the
        # moments, which are most of the bytes.
        in_place, at_home = (
            (update.weight_ready, None) if resident is not None else (None, update.weight_ready)
        )
        updated = self._lane_in.submit(
            bring_gradient_and_update, after=[visit.staged], fence=in_place
        )
        update.gradient_read(updated)
        self._lane_out.submit(weight_home, after=[updated], fence=at_home)
        self._lane_out.submit(rest_home, after=[updated], fence=update.done)
        visit.free = update.done
        self.num_updated += chunk.numel

    def _stage_ahead(self) -> None:
        """Bring in the state of the first chunks of the schedule, as many as there are buffers."""
        for chunk, state in self._schedule:
            if len(self._idle) <= self._num_helping:
                break
            if chunk.key in self._staged:
                continue
            last_update = self._queue.reserve(chunk.key)
            if last_update is None:
                continue
            visit = self._idle.pop(0)
            home = [t[chunk.start : chunk.end] for t in state.tensors()]
            self._stage(visit, home, after=last_update)
            self._staged[chunk.key] = visit

    def _stage(self, visit: _Visit, home: Sequence[Tensor], after: Sequence[Fence]) -> None:
        def bring() -> None:
            for buffer, source in zip(visit.buffers, home, strict=True):
                buffer[: source.numel()].copy_(source, non_blocking=True)

        visit.generation = self._generation
        earlier = [visit.free] if visit.free is not None else []
        visit.staged = self._lane_in.submit(bring, after=[*earlier, *after])


def _conduct_visits(reference: weakref.ref[Visitor], queue: UpdateQueue) -> None:
    """The visitor's thread. It refers to the visitor, and so to all state, only while it works."""
    try:
        visitor = reference()
        if visitor is not None:
            visitor._stage_ahead()
        while visitor is not None:
            min_backlog, can_stage = visitor._admitted_backlog(), visitor._can_stage()
            del visitor
            update: ChunkUpdate | Literal["idle"] | None
            if can_stage:
                update = queue.take_or_idle(min_backlog=min_backlog)
            else:
                update = queue.take(reserved=True, min_backlog=min_backlog)
            visitor = reference()
            if update is None:
                return
            if update == "idle":
                if visitor is not None:
                    visitor._stage_ahead()
            elif visitor is not None:
                visitor._run_one(update)
            del update
    except BaseException as error:  # the reserved chunks are nobody else's
        queue.break_off(error)
