"""Staging: page-aligned host memory between the disk and whoever works on records.

A fixed number of equal buffers, so that a plan can state their bytes. Records that travel together
lie in one buffer, each in whole pages, so that small ones take no more than they are. Knows who has
a buffer and when it will be free again; moves nothing itself.

Memory that belongs to somebody else, a guest, serves as one more buffer for one journey.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outcore.errors import LaneError
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger
from outcore.store.record_layout import page_aligned_bytes
from outcore.stream.lanes import Fence


def staging_bytes(num_buffers: int, largest_bytes: int) -> int:
    """Return the host memory that a pool takes."""
    return num_buffers * page_aligned_bytes(largest_bytes)


@dataclass(kw_only=True, eq=False)
class Guest:
    """Bytes in whole pages that their owner does not need for a while.

    ``free`` is passed, never with an error, when nobody uses them any more.
    """

    memory: Tensor
    free: Fence = field(default_factory=Fence)


@dataclass(kw_only=True, eq=False)
class _Buffer:
    """Memory for records that travel together, some of which may be lent."""

    memory: Tensor
    guest: Guest | None = None  # whose memory it is; None: the pool's
    num_lent: int = 0
    free_after: list[Fence] = field(default_factory=list)  # of those that came back


class StagingPool:
    """``num_buffers`` buffers, handed out in the order of their return.

    Parts are lent from ``lend`` to ``take_back``. ``take_back`` may come early, with the
    fence that says when the part is really free: whoever gets the buffer next waits for that.
    """

    def __init__(self, num_buffers: int, largest_bytes: int, *, ledger: Ledger, pin: bool) -> None:
        """``largest_bytes``: the most of records that travel together."""
        if num_buffers < 1:
            raise ValueError(f"staging needs at least 1 buffer, not {num_buffers}")
        self.num_buffers = num_buffers
        self.buffer_bytes = page_aligned_bytes(largest_bytes)
        self.num_bytes = staging_bytes(num_buffers, largest_bytes)
        arena = HostArena(self.num_bytes, purpose="disk staging", ledger=ledger, pin=pin)
        # A map starts on a page, and each buffer is whole pages.
        memory = [arena.span(self.buffer_bytes, torch.uint8) for _ in range(num_buffers)]
        self._free = deque(_Buffer(memory=each) for each in memory)
        self._lent: dict[int, _Buffer] = {}  # whose part begins at an address
        self._lock = threading.Lock()

    def lend(
        self, sizes_bytes: Sequence[int], guest: Guest | None = None
    ) -> tuple[list[Tensor], list[Fence]]:
        """Return parts of these sizes of one buffer, and what to wait for before touching them.

        Raises LaneError when every buffer is lent: whoever could give one back may be the very
        thread that asks, so waiting here might never end. ``guest``: memory to lend instead.
        """
        with self._lock:
            if guest is not None:
                buffer = _Buffer(memory=guest.memory, guest=guest)
            elif self._free:
                buffer = self._free.popleft()
            else:
                raise LaneError(
                    f"all {self.num_buffers} staging buffers are in use: store or release one "
                    "before fetching the next, or plan for more"
                )
            parts, start = [], 0
            for num_bytes in sizes_bytes:
                parts.append(buffer.memory[start : start + num_bytes])
                start += page_aligned_bytes(num_bytes)
            assert start <= buffer.memory.numel(), f"{sizes_bytes} in {buffer.memory.numel()}"
            self._lent.update((part.data_ptr(), buffer) for part in parts)
            buffer.num_lent = len(parts)
            free_after, buffer.free_after = buffer.free_after, []
        return parts, free_after

    def check_lent(self, part: Tensor) -> None:
        with self._lock:
            if part.data_ptr() not in self._lent:
                raise ValueError("this is no staging buffer, or it was given back already")

    def take_back(self, part: Tensor, free_after: Fence) -> tuple[Guest, list[Fence]] | None:
        """Take a lent part back; ``free_after`` must carry no error.

        The buffer is lent again as soon as all of it is back. A guest that is back is returned,
        with the fences behind which it is free.
        """
        self.check_lent(part)
        with self._lock:
            buffer = self._lent.pop(part.data_ptr())
            if free_after not in buffer.free_after:
                buffer.free_after.append(free_after)
            buffer.num_lent -= 1
            if buffer.num_lent:
                return None
            if buffer.guest is not None:
                return buffer.guest, buffer.free_after
            self._free.append(buffer)
            return None
