"""The visitor: optimizer state that visits the device over the link, is updated there, goes home.

It helps the host's cores, with which it shares the queue, when gradients pile up: the link is
mostly idle then. The home of the state stays the host.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.optim.state import UnitState
from outcore.optim.updates import ChunkUpdate, UpdateQueue
from outcore.stream.lanes import Fence, Lane

# Chunks that wait before the visitor helps the host with them: the host moves fewer bytes for the
# same work, so the link gets only what the host cannot keep up with.
_MIN_BACKLOG = 8


@dataclass(kw_only=True, eq=False)
class _Visit:
    """Device buffers for one chunk's state and gradient."""

    buffers: list[Tensor]
    gradient: Tensor
    free: Fence  # the last copy home out of these buffers


def visit_bytes(state: UnitState, numel: int, gradient_dtype: torch.dtype) -> int:
    """Return the device bytes of one visit of ``numel`` elements."""
    each = state.weight.itemsize + gradient_dtype.itemsize
    return numel * each + state.format.num_bytes(numel)


class Visitor:
    """One thread that conducts two lanes: state in (and the update itself), state out."""

    def __init__(
        self,
        queue: UpdateQueue,
        *,
        num_visits: int,
        like: UnitState,
        numel: int,
        device: torch.device,
        gradient_dtype: torch.dtype,
    ) -> None:
        """``like``: the state of the largest chunk, which has ``numel`` elements."""
        self.num_updated = 0  # elements, since the start
        buffers = [
            [torch.empty_like(tensor, device=device) for tensor in like.cut(0, numel)]
            for _ in range(num_visits)
        ]
        gradients = [
            torch.empty(numel, dtype=gradient_dtype, device=device) for _ in range(num_visits)
        ]
        # Their memory may still be in use under its last owner, on the compute stream.
        allocated = Fence.after_compute(device)
        self._visits = [
            _Visit(buffers=b, gradient=g, free=allocated)
            for b, g in zip(buffers, gradients, strict=True)
        ]
        self._turn = 0
        self._lane_in = Lane("visit-in", device, hardware="to device")
        self._lane_out = Lane("visit-out", device, hardware="to host")
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

    def _wait_for_buffers(self) -> None:
        """Wait here, not on the lane: that leaves the rest of the queue to the host."""
        self._visits[self._turn].free.block()

    def _run_one(self, update: ChunkUpdate) -> None:
        try:
            self._conduct(update)
        except BaseException as error:
            update.fail(error)

    def _conduct(self, update: ChunkUpdate) -> None:
        chunk = update.chunk
        for fence in update.after:
            fence.block()
        visit = self._visits[self._turn]
        self._turn = (self._turn + 1) % len(self._visits)
        buffers = update.state.format.cut(visit.buffers, 0, chunk.numel)
        gradient = visit.gradient[: chunk.numel]
        home = update.home_tensors()
        resident = chunk.unit.device_weight

        def bring_and_update() -> None:
            for buffer, source in zip(buffers, home, strict=True):
                buffer.copy_(source, non_blocking=True)
            gradient.copy_(update.gradient(), non_blocking=True)
            update.apply(buffers, gradient)
            if resident is not None:
                resident[chunk.start : chunk.end].copy_(buffers[0])

        def weight_home() -> None:
            home[0].copy_(buffers[0], non_blocking=True)

        def rest_home() -> None:
            for place, buffer in zip(home[1:], buffers[1:], strict=True):
                place.copy_(buffer, non_blocking=True)

        # The forward waits for resident weights, or for streamed ones to be home; never for the
        # moments, which are most of the bytes.
        in_place, at_home = (
            (update.weight_ready, None) if resident is not None else (None, update.weight_ready)
        )
        updated = self._lane_in.submit(
            bring_and_update, after=[visit.free], fence=in_place, label=update.label
        )
        update.gradient_read(updated)
        self._lane_out.submit(weight_home, after=[updated], fence=at_home)
        self._lane_out.submit(rest_home, after=[updated], fence=update.done, label=update.label)
        visit.free = update.done
        self.num_updated += chunk.numel


def _conduct_visits(reference: weakref.ref[Visitor], queue: UpdateQueue) -> None:
    """The visitor's thread. It refers to the visitor, and so to all state, only while it works."""
    try:
        while (visitor := reference()) is not None:
            visitor._wait_for_buffers()
            del visitor
            update = queue.take(min_backlog=_MIN_BACKLOG)
            visitor = reference()
            if update is None:
                return
            if visitor is not None:
                visitor._run_one(update)
            del visitor, update
    except BaseException as error:
        queue.break_off(error)
