"""The ring: a few host buffers that gradients pass through on their way into updates.

A gradient's copy takes a buffer when its turn comes, and the gradient's update gives it back, once.
An update may fail before that turn: then nothing is taken, or what was taken goes back at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

from torch import Tensor

from outcore.stream.disk_lanes import wait_over
from outcore.stream.lanes import Fence

Buffers = queue.SimpleQueue[tuple[Tensor, Fence | None]]
"""Each with the fence behind which it is free."""


class GradientRing:
    """Buffers that are lent one at a time, in the order of their return."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._free: Buffers = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put((buffer, None))

    @property
    def num_free(self) -> int:
        return self._free.qsize()

    def loan(self) -> Loan:
        """Return a loan that has no buffer yet."""
        return Loan(self._free)


class Loan:
    """One gradient's use of a buffer."""

    def __init__(self, free: Buffers) -> None:
        self._free = free
        self._buffer: Tensor | None = None
        self._is_over = False
        self._lock = threading.Lock()  # a copy may take while its update gives back

    @property
    def buffer(self) -> Tensor:
        assert self._buffer is not None, "nothing was taken"
        return self._buffer

    @property
    def is_over(self) -> bool:
        """Whether nobody wants the gradient any more."""
        return self._is_over

    def take(self) -> Tensor | None:
        """Wait for a buffer and return it; None if nobody wants it any more."""
        buffer, free_after = self._free.get()
        with self._lock:
            if self._is_over:
                self._free.put((buffer, free_after))
                return None
            self._buffer = buffer
        if free_after is not None:
            wait_over([free_after])  # its last reader's failure is not this gradient's
        return buffer

    def give_back(self, free_after: Fence | None) -> None:
        """End the loan; whoever gets the buffer next waits for ``free_after``."""
        with self._lock:
            is_over, self._is_over = self._is_over, True
        if self._buffer is not None and not is_over:
            self._free.put((self._buffer, free_after))
