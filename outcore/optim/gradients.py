"""Gradients on their way from the backward to the optimizer.

Within a block they add up in fp32 on the device and leave once, in the *wire* type. A unit's
gradient then waits in its home until ``zero_grad``, and a further backward adds to it by the same
rule in every tier: previous (wire) + new in fp32, rounded to the wire type. In passing mode, for
updates during the backward, nothing waits: chunks go through a small ring to the updaters.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outcore.kernels import accumulate_
from outcore.optim.updates import Chunk
from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.store.ledger import Ledger
from outcore.store.spans import Field
from outcore.stream.lanes import Fence, Lane
from outcore.stream.unit import Unit

RING_BUFFERS = 16  # with chunks of 64 MiB of bf16: 1 GiB


class Accumulator:
    """The fp32 sum of one unit's gradients over its micro-batches, on the device.

    ``flat`` must hold zeros between the fields of the layout; the fields themselves may hold
    anything, because the first micro-batch overwrites them.
    """

    def __init__(self, unit: Unit, flat: Tensor) -> None:
        self.unit = unit
        self.flat = flat
        self._fields = [flat[f.offset : f.end].view(f.shape) for f in unit.layout.trainable]
        self._is_empty = True

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients, in the order of layout.trainable; None is zero."""
        for total, gradient in zip(self._fields, gradients, strict=True):
            if gradient is not None:
                accumulate_(total, gradient, is_first=self._is_empty)
            elif self._is_empty:
                total.zero_()
        self._is_empty = False

    def total(self) -> Tensor:
        """Return the sum; zero if nothing was added."""
        return self.flat.zero_() if self._is_empty else self.flat


class GradientSink(Protocol):
    """Where a finished gradient goes."""

    def deliver(self, unit: Unit, start: int, wire: Tensor, ready: Fence) -> Fence:
        """Take elements [start, start + wire.numel()); return when ``wire`` may be reused."""

    def previous(self, unit: Unit, start: int, numel: int) -> Tensor | None:
        """Return on the device what the unit has already, None if nothing."""


class Gradients:
    """Collects the gradients of blocks (through accumulators) and edges, and their norms."""

    def __init__(
        self,
        units: Sequence[Unit],
        sink: GradientSink,
        *,
        device: torch.device,
        wire_dtype: torch.dtype,
        ledger: Ledger,
    ) -> None:
        self._sink = sink
        self._device = device
        self._wire_dtype = wire_dtype
        self._ledger = ledger
        numel = max((u.layout.trainable_numel for u in units if u.arrives_whole), default=0)
        self._ledger_bytes = numel * (4 + 2 * wire_dtype.itemsize)
        ledger.take(
            "gradient buffers",
            self._ledger_bytes,
            remedy="Use a larger device_memory, or freeze part of the model.",
        )
        self._sum = torch.zeros(numel, dtype=torch.float32, device=device)
        self._sum_layout: tuple[Field, ...] = ()
        self._wires = [torch.zeros(numel, dtype=wire_dtype, device=device) for _ in range(2)]
        self._wire_free: list[Fence | None] = [None, None]
        self._turn = 0
        # One squared norm for each block and for each parameter of an edge.
        self._norm_rows: dict[tuple[int, str], int] = {}
        for unit in units:
            for name in _norm_keys(unit):
                self._norm_rows[unit.index, name] = len(self._norm_rows)
        self._squared_norms = torch.zeros(len(self._norm_rows), device=device)

    def accumulator(self, unit: Unit) -> Accumulator:
        """Return the accumulator for the unit's backward; one is in use at a time."""
        flat = self._sum[: unit.layout.trainable_numel]
        if self._sum_layout != unit.layout.fields:
            flat.zero_()  # another layout has left its values between this one's fields
            self._sum_layout = unit.layout.fields
        return Accumulator(unit, flat)

    def finish(self, accumulator: Accumulator) -> None:
        """Send a block's summed gradient on its way."""
        unit, total = accumulator.unit, accumulator.total()
        earlier = self._sink.previous(unit, 0, total.numel())
        if earlier is not None:
            total.add_(earlier)
        self._note_norm(unit, "", total)
        turn, self._turn = self._turn, 1 - self._turn
        free = self._wire_free[turn]
        if free is not None:
            free.before_compute()
        wire = self._wires[turn][: total.numel()]
        wire.copy_(total)
        ready = Fence.after_compute(self._device)
        self._wire_free[turn] = self._sink.deliver(unit, 0, wire, ready)

    def edge(self, unit: Unit, field: Field, gradient: Tensor) -> None:
        """Send the gradient of one parameter of an edge on its way."""
        wire = gradient.detach().to(self._wire_dtype).reshape(-1)
        earlier = self._sink.previous(unit, field.offset, field.numel)
        if earlier is not None:
            wire = (wire.float() + earlier.float()).to(self._wire_dtype)
        self._note_norm(unit, field.name, wire)
        self._sink.deliver(unit, field.offset, wire, Fence.after_compute(self._device))

    def squared_norms(self) -> dict[tuple[int, str], float]:
        """Return the squared norm of each gradient by (unit, parameter); waits for the device."""
        values = self._squared_norms.tolist()
        return {key: values[row] for key, row in self._norm_rows.items()}

    def clear_norms(self) -> None:
        self._squared_norms.zero_()

    def close(self) -> None:
        self._ledger.give_back("gradient buffers", self._ledger_bytes)
        self._ledger_bytes = 0

    def _note_norm(self, unit: Unit, name: str, gradient: Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._squared_norms[self._norm_rows[unit.index, name]] = norm.square()


def _norm_keys(unit: Unit) -> list[str]:
    if unit.layout.trainable_numel == 0:
        return []
    return [""] if unit.arrives_whole else [f.name for f in unit.layout.trainable]


class WaitingSink:
    """Gradients wait in a home of their own, on the host or the device, until they are used."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        home: str,
        device: torch.device,
        wire_dtype: torch.dtype,
        copy_out: Lane,
        copy_back: Lane,
        host_ledger: Ledger,
        device_ledger: Ledger,
        pin: bool,
    ) -> None:
        self._device = device
        self._copy_out = copy_out
        self._copy_back = copy_back
        total = sum(aligned_bytes(u.layout.trainable_numel, wire_dtype) for u in units)
        self._homes: dict[int, Tensor] = {}
        if home == "host":
            arena = HostArena(total, purpose="gradients", ledger=host_ledger, pin=pin)
            for unit in units:
                self._homes[unit.index] = arena.span(unit.layout.trainable_numel, wire_dtype)
        else:
            device_ledger.take("gradients", total, remedy='Use state="host".')
            for unit in units:
                numel = unit.layout.trainable_numel
                self._homes[unit.index] = torch.zeros(numel, dtype=wire_dtype, device=device)
        self._fences: dict[int, dict[int, Fence]] = {}

    def deliver(self, unit: Unit, start: int, wire: Tensor, ready: Fence) -> Fence:
        home = self._homes[unit.index]
        target = home[start : start + wire.numel()]
        # An update that still reads the home finishes first.
        fence = self._copy_out.submit(
            _copying(target, wire, self._copy_out), after=[ready, *unit.pending]
        )
        self._fences.setdefault(unit.index, {})[start] = fence
        return fence

    def previous(self, unit: Unit, start: int, numel: int) -> Tensor | None:
        if start not in self._fences.get(unit.index, {}):
            return None
        source = self._homes[unit.index][start : start + numel]
        back = torch.empty(numel, dtype=source.dtype, device=self._device)
        arrived = self._copy_back.submit(
            _copying(back, source, self._copy_back),
            after=[self._fences[unit.index][start], Fence.after_compute(self._device)],
        )
        arrived.before_compute()
        return back

    def has_gradient(self, chunk: Chunk) -> bool:
        return chunk.delivery in self._fences.get(chunk.unit.index, {})

    def gradient(self, chunk: Chunk) -> tuple[Callable[[], Tensor], list[Fence]]:
        """Return how to get the chunk's gradient, and what to wait for first."""
        home = self._homes[chunk.unit.index]
        arrived = self._fences[chunk.unit.index][chunk.delivery]
        return lambda: home[chunk.start : chunk.end], [arrived]

    def clear(self) -> None:
        self._fences.clear()


class PassingSink:
    """Gradients pass through a ring of host buffers straight into updates, chunk by chunk."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        wire_dtype: torch.dtype,
        copy_out: Lane,
        host_ledger: Ledger,
        pin: bool,
        submit: Callable[..., None],
        direct: Callable[[Chunk], tuple[Tensor, list[Fence]] | None],
    ) -> None:
        """``submit`` takes (chunk, gradient, fences, on_read) of each update.

        ``direct`` says where on the device a chunk's gradient may go instead of the ring.
        """
        self._copy_out = copy_out
        self._submit = submit
        self._direct = direct
        self._chunks: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            self._chunks.setdefault(chunk.unit.index, []).append(chunk)
        numel = max(chunk.numel for chunk in chunks)
        arena = HostArena(
            RING_BUFFERS * aligned_bytes(numel, wire_dtype),
            purpose="gradients",
            ledger=host_ledger,
            pin=pin,
        )
        self._ring: queue.SimpleQueue[tuple[Tensor, Fence | None]] = queue.SimpleQueue()
        for _ in range(RING_BUFFERS):
            self._ring.put((arena.span(numel, wire_dtype), None))

    def deliver(self, unit: Unit, start: int, wire: Tensor, ready: Fence) -> Fence:
        fence = ready
        for chunk in self._chunks[unit.index]:
            if chunk.delivery == start:
                fence = self._pass_on(chunk, wire[chunk.start - start : chunk.end - start], ready)
        return fence

    def previous(self, unit: Unit, start: int, numel: int) -> Tensor | None:
        return None  # the optimizer refuses a second gradient before it gets here

    def _pass_on(self, chunk: Chunk, wire: Tensor, ready: Fence) -> Fence:
        place = self._direct(chunk)
        if place is not None:
            buffer, free = place
            copying = _copying(buffer, wire, self._copy_out)
            arrived = self._copy_out.submit(copying, after=[ready, *free])
            self._submit(chunk, lambda: buffer, [arrived], None)
            return arrived
        held: list[Tensor] = []

        def copy() -> None:
            buffer, free = self._ring.get()
            if free is not None:
                free.block()
            held.append(buffer)
            target = buffer[: wire.numel()]
            target.copy_(wire, non_blocking=True)
            _hold(wire, self._copy_out)

        arrived = self._copy_out.submit(copy, after=[ready])
        self._submit(
            chunk,
            lambda: held[0][: chunk.numel],
            [arrived],
            lambda fence: self._ring.put((held[0], fence)) if held else None,
        )
        return arrived


def _copying(target: Tensor, source: Tensor, lane: Lane) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        _hold(source, lane)
        _hold(target, lane)

    return copy


def _hold(tensor: Tensor, lane: Lane) -> None:
    """Keep the allocator from reusing device memory before the lane's copy has read it."""
    if tensor.is_cuda and lane.stream is not None:
        tensor.record_stream(lane.stream)
