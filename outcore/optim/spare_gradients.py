"""The memory of gradients that wait, while none is there: lent to state on its way to a disk.

A step with state on disk ends with a backward, during which the disk would rest: the state of the
last chunks, read and updated but not yet written, can wait in memory until then. Gradients that
this step has used have left theirs; the next ones come at the end of that backward for the first
units, so it is lent from the first unit on, and whoever was lent to last is to be done first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.store.host_arena import aligned_bytes
from outcore.store.record_layout import page_aligned_bytes
from outcore.stream.lanes import Fence
from outcore.stream.staging import Guest
from outcore.stream.unit import Unit


def lends_gradients(unit: Unit) -> bool:
    """Whether a unit's gradient is written as a whole, so that nothing else must stay there."""
    return unit.state_home == "disk" and unit.arrives_whole


@dataclass(kw_only=True, eq=False)
class _Home:
    """Where the gradient of a unit waits: bytes [start, end) of what can be lent."""

    start: int
    end: int
    is_taken: bool = False  # by a gradient that is there or on its way
    arriving: Fence | None = None  # the last copy to it, also of a gradient that was dropped
    num_unread: int = 0  # updates of it that are queued, maybe of two steps

    @property
    def is_free(self) -> bool:
        is_copied = self.arriving is None or self.arriving.is_done
        return is_copied and not self.is_taken and self.num_unread == 0


class SpareGradients:
    """The gradients of ``units``, one behind the other in ``memory``, and who has it meanwhile.

    Any thread may call: gradients come and go on the training's, the disk's updater borrows.
    """

    def __init__(self, units: Sequence[Unit], memory: Tensor, dtype: torch.dtype) -> None:
        """``units``: in the order of their updates; ``memory``: ``num_bytes``, from a page on."""
        self._memory = memory
        self._homes: dict[int, _Home] = {}
        self.spans: dict[int, Tensor] = {}  # by the unit's index
        start = 0
        for unit in units:
            numel = unit.layout.trainable_numel
            end = start + aligned_bytes(numel, dtype)
            self._homes[unit.index] = _Home(start=start, end=end)
            self.spans[unit.index] = memory[start:end].view(dtype)[:numel]
            start = end
        self._lent: list[tuple[int, int, Guest]] = []  # from, to, and what is there
        self._is_new_step = False
        self._lock = threading.Lock()
        self.num_lent = 0  # since the start

    @staticmethod
    def num_bytes(units: Sequence[Unit], dtype: torch.dtype) -> int:
        return sum(aligned_bytes(unit.layout.trainable_numel, dtype) for unit in units)

    # --- gradients come and go --------------------------------------------------------------------

    def comes(self, unit: Unit) -> list[Fence]:
        """Say that a gradient is on its way; return what it waits for."""
        with self._lock:
            home = self._homes.get(unit.index)
            if home is None:
                return []
            home.is_taken = True
            return [
                guest.free
                for start, end, guest in self._lent
                if start < home.end and home.start < end
            ]

    def arrives_behind(self, unit: Unit, fence: Fence) -> None:
        """Say behind what the gradient that comes is there: it is copied even if it is dropped."""
        with self._lock:
            if unit.index in self._homes:
                self._homes[unit.index].arriving = fence

    def will_be_read(self, unit: Unit) -> None:
        """Say that an update of a part of the unit's gradient is about to be queued."""
        self._count_unread(unit, 1)

    def was_read(self, unit: Unit) -> None:
        """Say that such an update has read it, or never will."""
        self._count_unread(unit, -1)

    def _count_unread(self, unit: Unit, change: int) -> None:
        with self._lock:
            if unit.index in self._homes:
                self._homes[unit.index].num_unread += change

    def cleared(self) -> None:
        """Say that no gradient is wanted any more, but by updates that are queued."""
        with self._lock:
            for home in self._homes.values():
                home.is_taken = False
            self._is_new_step = True

    # --- lending ----------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return how much can be lent now."""
        with self._lock:
            return self._free_end() - self._lent_end()

    def lend(self, num_bytes: int) -> Guest | None:
        """Return so many bytes, in whole pages; None where they are not free."""
        with self._lock:
            start = self._lent_end()
            end = start + page_aligned_bytes(num_bytes)
            if end > self._free_end():
                return None
            guest = Guest(memory=self._memory[start:end])
            self._lent.append((start, end, guest))
            self.num_lent += 1
            return guest

    def _lent_end(self) -> int:
        """Return where the next loan begins: at the start again, once a step's are all over."""
        if self._is_new_step and all(guest.free.is_issued for _, _, guest in self._lent):
            self._lent.clear()
            self._is_new_step = False
        return self._lent[-1][1] if self._lent else 0

    def _free_end(self) -> int:
        end = 0
        for home in self._homes.values():  # in the order of their updates
            if not home.is_free:
                break
            end = home.end
        return end
