"""Where a finished gradient goes: to wait for ``step()``, or straight into an update.

Waiting, each unit's gradient has a home of its own until ``zero_grad``. Passing, for updates during
the backward, chunks go through a small ring of host buffers to the updaters. Either way a chunk
whose state is visiting the device takes its gradient there directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outcore.optim.gradient_ring import GradientRing
from outcore.optim.spare_gradients import SpareGradients, lends_gradients
from outcore.optim.updates import Chunk
from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.store.ledger import Ledger
from outcore.stream.lanes import Fence, Lane
from outcore.stream.unit import Unit

RING_BUFFERS = 24  # with chunks of 64 MiB of bf16: 1.5 GiB
# Updates through a disk run in the order in which gradients come: more would only wait there.
DISK_RING_ELEMENTS = 1 << 27
DISK_RING_BUFFERS = 8, 64  # at least, at most

DirectPlace = Callable[[Chunk], "tuple[Tensor, list[Fence]] | None"]
"""Says where on the device a chunk's gradient may go, and after what; None: to the host."""


def num_ring_buffers(chunk_numel: int, *, on_disk: bool) -> int:
    """Return the buffers of a ring of chunks; ``on_disk``: some weights or state are there."""
    if not on_disk:
        return RING_BUFFERS
    least, most = DISK_RING_BUFFERS
    return max(least, min(most, -(-DISK_RING_ELEMENTS // max(1, chunk_numel))))


class GradientSink(Protocol):
    """Where a finished gradient goes."""

    def deliver(self, unit: Unit, start: int, wire: Tensor, ready: Fence) -> Fence:
        """Take elements [start, start + wire.numel()); return when ``wire`` may be reused."""

    def previous(self, unit: Unit, start: int, numel: int) -> Tensor | None:
        """Return on the device what the unit has already, None if nothing."""


class WaitingSink:
    """Gradients wait in a home of their own, on the host or the device, until they are used."""

    def __init__(
        self,
        units: Sequence[Unit],
        chunks: Sequence[Chunk],
        *,
        direct: DirectPlace,
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
        self._direct = direct
        self._chunks = _by_unit(chunks)
        self._visiting: dict[tuple[int, int], tuple[Tensor, Fence]] = {}
        self._homes: dict[int, Tensor] = {}
        self.spare: SpareGradients | None = None  # what state on disk may use for a while
        on_host = [unit for unit in units if unit.state_home != "device"]
        if on_host:
            total = sum(aligned_bytes(u.layout.trainable_numel, wire_dtype) for u in on_host)
            arena = HostArena(total, purpose="gradients", ledger=host_ledger, pin=pin)
            lending = [unit for unit in on_host if lends_gradients(unit)]
            if lending:  # first, because an arena begins at a page
                memory = arena.span(SpareGradients.num_bytes(lending, wire_dtype), torch.uint8)
                self.spare = SpareGradients(lending, memory, wire_dtype)
                self._homes.update(self.spare.spans)
            for unit in on_host:
                if unit.index not in self._homes:
                    self._homes[unit.index] = arena.span(unit.layout.trainable_numel, wire_dtype)
        on_device = [unit for unit in units if unit.state_home == "device"]
        total = sum(u.layout.trainable_numel * wire_dtype.itemsize for u in on_device)
        device_ledger.take("gradients", total, remedy='Use state="host".')
        for unit in on_device:
            numel = unit.layout.trainable_numel
            self._homes[unit.index] = torch.zeros(numel, dtype=wire_dtype, device=device)
        self._fences: dict[int, dict[int, Fence]] = {}

    def deliver(self, unit: Unit, start: int, wire: Tensor, ready: Fence) -> Fence:
        home = self._homes[unit.index]
        target = home[start : start + wire.numel()]
        # An update that still reads the home finishes first, and so does whoever borrowed it.
        lent = self.spare.comes(unit) if self.spare is not None else []
        fence = self._copy_out.submit(
            _copying(target, wire, self._copy_out),
            after=[ready, *unit.pending, *lent],
            label=f"gradient {unit.name}",
        )
        if self.spare is not None:
            self.spare.arrives_behind(unit, fence)
        self._fences.setdefault(unit.index, {})[start] = fence
        for chunk in self._chunks[unit.index]:
            is_free = chunk.delivery == start and all(f.is_issued for f in unit.pending)
            place = self._direct(chunk) if is_free else None
            if place is not None:
                self._visiting[chunk.key] = _put(chunk, place, wire, start, self._device)
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
        visiting = self._visiting.pop(chunk.key, None)  # gone once used; the home stays
        if visiting is not None:
            buffer, there = visiting
            return lambda: buffer, [there]
        home = self._homes[chunk.unit.index]
        arrived = self._fences[chunk.unit.index][chunk.delivery]
        if self.spare is not None:
            self.spare.will_be_read(chunk.unit)
        return lambda: home[chunk.start : chunk.end], [arrived]

    def was_read(self, chunk: Chunk, after: Fence | None) -> None:
        """Say that an update has read the chunk's gradient, or that none will."""
        if self.spare is not None:
            assert after is None or not lends_gradients(chunk.unit), "state on disk reads at once"
            self.spare.was_read(chunk.unit)

    def clear(self) -> None:
        self._fences.clear()
        self._visiting.clear()
        if self.spare is not None:
            self.spare.cleared()


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
        check: Callable[[Chunk], None],
        direct: DirectPlace,
        device: torch.device,
    ) -> None:
        """``check`` raises if a chunk may not have another update yet.

        ``submit`` takes (chunk, gradient, fences, on_read) of each update.
        """
        self.drops = False  # gradients that come now are only measured
        self._device = device
        self._copy_out = copy_out
        self._submit = submit
        self._check = check
        self._direct = direct
        self._chunks = _by_unit(chunks)
        self._ring = GradientRing(())
        numel = max((c.numel for c in chunks if c.unit.state_home != "device"), default=0)
        if numel == 0:
            return
        num_buffers = num_ring_buffers(numel, on_disk=any(c.unit.is_on_disk for c in chunks))
        arena = HostArena(
            num_buffers * aligned_bytes(numel, wire_dtype),
            purpose="gradients",
            ledger=host_ledger,
            pin=pin,
        )
        self._ring = GradientRing(arena.span(numel, wire_dtype) for _ in range(num_buffers))

    def check(self, unit: Unit, start: int) -> None:
        """Raise if what is delivered at ``start`` may not have another update yet."""
        for chunk in self._chunks.get(unit.index, ()):
            if chunk.delivery == start:
                self._check(chunk)

    def deliver(self, unit: Unit, start: int, wire: Tensor, ready: Fence) -> Fence:
        self.check(unit, start)  # before anything is overwritten
        if self.drops:
            return ready
        fence = ready  # the lane keeps its order: its last copy's fence stands for all
        for chunk in self._chunks[unit.index]:
            if chunk.delivery != start:
                continue
            part = wire[chunk.start - start : chunk.end - start]
            place = self._direct(chunk)
            if place is not None:
                buffer, there = _put(chunk, place, wire, start, self._device)
                self._submit(chunk, partial(_identity, buffer), [there], None)
            elif unit.state_home == "device":  # updated at once, in the order of the compute stream
                self._submit(chunk, partial(_identity, part), [ready], None)
            else:
                fence = self._through_ring(chunk, part, ready)
        return fence

    def previous(self, unit: Unit, start: int, numel: int) -> Tensor | None:
        return None  # the optimizer refuses a second gradient before it gets here

    def _through_ring(self, chunk: Chunk, wire: Tensor, ready: Fence) -> Fence:
        loan, arrived = self._ring.loan(), Fence()

        def copy() -> None:
            if not loan.is_over:
                loan.buffer[: wire.numel()].copy_(wire, non_blocking=True)
                _hold(wire, self._copy_out)

        try:
            # The update first: one that is refused has borrowed nothing.
            self._submit(chunk, lambda: loan.buffer[: chunk.numel], [arrived], loan.give_back)
            label = f"gradient {chunk.unit.name}"
            self._copy_out.submit(copy, after=[ready], first=loan.take, fence=arrived, label=label)
        except BaseException as error:  # whoever has the update must not wait for its gradient
            arrived.error = error
            arrived.mark_issued()
            raise
        return arrived


def _by_unit(chunks: Sequence[Chunk]) -> dict[int, list[Chunk]]:
    grouped: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        grouped.setdefault(chunk.unit.index, []).append(chunk)
    return grouped


def _put(
    chunk: Chunk,
    place: tuple[Tensor, list[Fence]],
    wire: Tensor,
    start: int,
    device: torch.device,
) -> tuple[Tensor, Fence]:
    """Copy a chunk's gradient on the device; behind no lane, where others may be waiting."""
    buffer, free = place
    for fence in free:
        fence.before_compute()
    buffer.copy_(wire[chunk.start - start : chunk.end - start])
    return buffer, Fence.after_compute(device)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


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
