"""Staging buffers: page-aligned host memory between the disk and whoever works on a record.

A fixed number of equal buffers, so that a plan can state their bytes. Knows who has a buffer and
when it will be free again; moves nothing itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

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


class StagingPool:
    """``num_buffers`` buffers of the largest record, handed out in the order of their return.

    A buffer is lent from ``lend`` to ``take_back``. ``take_back`` may come early, with the fence
    that says when the buffer is really free: whoever gets it next waits for that.
    """

    def __init__(self, num_buffers: int, largest_bytes: int, *, ledger: Ledger, pin: bool) -> None:
        if num_buffers < 1:
            raise ValueError(f"staging needs at least 1 buffer, not {num_buffers}")
        self.num_buffers = num_buffers
        self.buffer_bytes = page_aligned_bytes(largest_bytes)
        self.num_bytes = staging_bytes(num_buffers, largest_bytes)
        arena = HostArena(self.num_bytes, purpose="disk staging", ledger=ledger, pin=pin)
        # A map starts on a page, and each buffer is whole pages.
        buffers = [arena.span(self.buffer_bytes, torch.uint8) for _ in range(num_buffers)]
        self._free: deque[tuple[Tensor, Fence | None]] = deque((b, None) for b in buffers)
        self._lent: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def lend(self, num_bytes: int) -> tuple[Tensor, Fence | None]:
        """Return the first ``num_bytes`` of a buffer, and what to wait for before touching it.

        Raises LaneError when every buffer is lent: whoever could give one back may be the very
        thread that asks, so waiting here might never end.
        """
        return self.lend_all([num_bytes])[0]

    def lend_all(self, sizes_bytes: Sequence[int]) -> list[tuple[Tensor, Fence | None]]:
        """``lend`` for several buffers: all of them, or a LaneError."""
        assert max(sizes_bytes) <= self.buffer_bytes, f"{sizes_bytes} in {self.buffer_bytes}"
        with self._lock:
            if len(self._free) < len(sizes_bytes):
                raise LaneError(
                    f"all {self.num_buffers} staging buffers are in use: store or release one "
                    "before fetching the next, or plan for more"
                )
            lent = [self._free.popleft() for _ in sizes_bytes]
            self._lent.update((buffer.data_ptr(), buffer) for buffer, _ in lent)
        return [
            (buffer[:num_bytes], free_after)
            for (buffer, free_after), num_bytes in zip(lent, sizes_bytes, strict=True)
        ]

    def check_lent(self, buffer: Tensor) -> None:
        with self._lock:
            if buffer.data_ptr() not in self._lent:
                raise ValueError("this is no staging buffer, or it was given back already")

    def take_back(self, buffer: Tensor, free_after: Fence) -> None:
        """Take a lent buffer back, to be lent again at once; ``free_after`` must carry no error."""
        self.check_lent(buffer)
        with self._lock:
            self._free.append((self._lent.pop(buffer.data_ptr()), free_after))
