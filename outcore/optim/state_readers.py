"""Readers of optimizer state: whoever copies a unit's state while training goes on.

A reader's fences hold up the next update of the unit, and nothing else: a forward only reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from outcore.errors import LaneError
from outcore.optim.updates import ChunkUpdate
from outcore.stream.lanes import Fence
from outcore.stream.unit import Unit


class StateReaders:
    """The fences of readers by unit, and of each chunk's last update, which readers wait for."""

    def __init__(self) -> None:
        self._reading: dict[int, list[Fence]] = {}
        self._updated: dict[int, dict[int, tuple[Fence, Fence]]] = {}

    def last_updates(self, unit: Unit) -> list[Fence]:
        """Return the fences of the updates that were queued last, of all chunks of a unit."""
        return [fence for pair in self._updated.get(unit.index, {}).values() for fence in pair]

    def read(self, unit: Unit, fences: Sequence[Fence]) -> None:
        """Let later updates of the unit wait for ``fences``."""
        self._reading[unit.index] = [*self._still_reading(unit), *fences]

    def hold_up(self, update: ChunkUpdate) -> None:
        """Make an update that is about to be queued wait for the readers of its unit."""
        update.after = [*update.after, *self._still_reading(update.chunk.unit)]

    def queued(self, update: ChunkUpdate) -> None:
        unit, start = update.chunk.key
        self._updated.setdefault(unit, {})[start] = update.weight_ready, update.done

    def block(self) -> None:
        """Wait until nobody reads any more; a reader's failure is its own to report."""
        for fences in self._reading.values():
            for fence in fences:
                with contextlib.suppress(LaneError):
                    fence.block()
        self._reading.clear()

    def _still_reading(self, unit: Unit) -> list[Fence]:
        fences = self._reading.get(unit.index, ())
        return [fence for fence in fences if not fence.is_done]
