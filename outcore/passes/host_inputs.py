"""Block inputs that wait on the host between forward and backward.

A recomputed block keeps its input, one hidden state of the whole batch. For long sequences these
inputs are what fills the device; offloaded, each is copied out while its block runs, and comes back
one block ahead of the backward. Copies change no bit, and keep the order in memory: a kernel may
add in another order where that is another.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.store.ledger import Ledger
from outcore.stream.lanes import Fence, Lane


@dataclass(kw_only=True, eq=False)
class WaitingInput:
    """One input on the host. Its memory serves another one when nobody refers to this any more."""

    pool: HostInputs
    buffer: Tensor  # flat, on the host; it may be larger
    shape: torch.Size
    stride: tuple[int, ...]
    there: Fence  # the copy out
    below: WaitingInput | None  # the input that the backward will want next
    back: tuple[Tensor, Fence] | None = None  # on its way to the device, or there
    last_read: Fence | None = None

    def __del__(self) -> None:
        self.pool._give_back(self.buffer, [self.there, self.last_read])


class HostInputs:
    """Takes inputs in the order of a forward and returns them in the reverse one."""

    def __init__(self, *, device: torch.device, ledger: Ledger, pin: bool) -> None:
        self._device = device
        self._ledger = ledger
        self._pin = pin
        self._out: Lane | None = None
        self._in: Lane | None = None
        self._last: WaitingInput | None = None
        self._free: dict[torch.dtype, list[tuple[Tensor, list[Fence]]]] = defaultdict(list)
        self._lock = threading.RLock()  # re-entrant: the collector may give back anywhere

    def put(self, hidden: Tensor) -> WaitingInput:
        """Start to copy ``hidden`` to the host; the caller need not keep it."""
        if self._out is None:
            self._out = Lane("inputs-out", self._device, hardware="to host")
            self._in = Lane("inputs-in", self._device, hardware="to device")
        hidden = hidden.detach()
        if torch.empty_like(hidden, device="meta").stride() != hidden.stride():
            hidden = hidden.contiguous()  # it has gaps
        buffer, busy = self._take(hidden.numel(), hidden.dtype)
        lane = self._out

        def copy() -> None:
            buffer[: hidden.numel()].copy_(_in_memory(hidden), non_blocking=True)
            if lane.stream is not None:
                hidden.record_stream(lane.stream)  # it may be freed before it is copied

        there = lane.submit(copy, after=[Fence.after_compute(self._device), *busy])
        waiting = WaitingInput(
            pool=self,
            buffer=buffer,
            shape=hidden.shape,
            stride=hidden.stride(),
            there=there,
            below=self._last,
        )
        self._last = waiting
        return waiting

    def get(self, waiting: WaitingInput) -> Tensor:
        """Return an input on the device, ready for what is launched next; fetch the next one."""
        hidden, arrived = waiting.back or self._bring_back(waiting)
        waiting.back = None  # a second backward brings it back again
        if waiting.below is not None and waiting.below.back is None:
            waiting.below.back = self._bring_back(waiting.below)
        arrived.before_compute()
        if self._last is waiting:
            self._last = waiting.below
        return hidden

    def forget(self) -> None:
        """Before a forward: what is left of an earlier one has no backward that is in order."""
        self._last = None

    def close(self) -> None:
        for lane in (self._out, self._in):
            if lane is not None:
                lane.close()

    def _bring_back(self, waiting: WaitingInput) -> tuple[Tensor, Fence]:
        assert self._in is not None
        hidden = torch.empty_strided(
            waiting.shape, waiting.stride, dtype=waiting.buffer.dtype, device=self._device
        )
        lane = self._in

        def copy() -> None:
            _in_memory(hidden).copy_(waiting.buffer[: hidden.numel()], non_blocking=True)
            if lane.stream is not None:
                hidden.record_stream(lane.stream)

        # The memory of ``hidden`` may still be in use under its last owner.
        after = [Fence.after_compute(self._device), waiting.there]
        waiting.last_read = lane.submit(copy, after=after)
        return hidden, waiting.last_read

    def _take(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, list[Fence]]:
        # Lengths vary from batch to batch: a larger buffer serves, and a larger one takes the place
        # of one that does not, so that there are never more than were in use at a time.
        with self._lock:
            free = self._free[dtype]
            sizes = {i: entry[0].numel() for i, entry in enumerate(free)}
            fitting = {i: size for i, size in sizes.items() if size >= numel}
            if fitting:
                return free.pop(min(fitting, key=fitting.__getitem__))
            buffer, busy = free.pop(max(sizes, key=sizes.__getitem__)) if sizes else (None, [])
        for fence in busy:  # its memory goes: no copy may be under way
            fence.block()
        del buffer
        arena = HostArena(
            aligned_bytes(numel, dtype),
            purpose="block inputs",
            ledger=self._ledger,
            pin=self._pin,
        )
        return arena.span(numel, dtype), []

    def _give_back(self, buffer: Tensor, busy: list[Fence | None]) -> None:
        with self._lock:
            fences = [fence for fence in busy if fence is not None]
            self._free[buffer.dtype].append((buffer, fences))


def _in_memory(dense: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps, in the order in which they lie."""
    return dense.as_strided((dense.numel(),), (1,))
