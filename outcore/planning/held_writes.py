"""The last state of a simulated step on its way to disk: written while the backward runs.

Where gradients wait for clipping, the disk would rest during the backward. The state that is
updated last waits in what the first gradients have left until all is read, and is written then.
Whoever comes before that is done waits: a gradient for its memory, the next reads for the disk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from outcore.optim.rest_of_disk import USED
from outcore.planning.cost import Costs
from outcore.planning.lanes import DISK_READ, DISK_WRITE, LaneClock


def held_share(costs: Costs) -> float:
    """Return the part of all state on disk that the gradients of the rest have room for."""
    sizes = costs.bytes
    return sizes.gradient / (sizes.state + sizes.gradient)


class HeldWrites:
    """Knows which pieces of a step are held back, and until when that takes a gradient's place."""

    def __init__(
        self,
        clock: LaneClock,
        costs: Costs,
        numels: Sequence[int],
        *,
        num_ahead: float,
        rest_s: float,
    ) -> None:
        """``numels``: elements of each unit, 0 for those whose state is not on disk.

        ``num_ahead``: those of the elements that are being read while memory is looked for.
        ``rest_s``: for how long there is nothing to read.
        """
        self._clock = clock
        self._costs = costs
        self._total = float(sum(numels))
        has_room = max(0.0, self._total - num_ahead) * held_share(costs)
        has_time = USED * rest_s * costs.machine.disk_write_bytes_s / costs.bytes.state
        self._first_held = self._total - min(has_room, has_time)
        each = costs.bytes.gradient
        self._ends = [0.0]  # of each unit's gradient, in bytes
        for numel in numels:
            self._ends.append(self._ends[-1] + numel * each)
        self._done = 0.0  # elements of this step
        self._held: list[tuple[int, float]] = []  # units and bytes, in the order of their updates
        self._free_at: dict[int, float] = {}  # the memory of a unit's gradient
        self.written_at = 0.0  # all that was held

    def holds(self, numel: float) -> bool:
        """Say that so many elements come next; whether their write is held back."""
        self._done += numel
        # Where nothing is held, what rounding has left of a piece is not, either.
        return self._first_held < self._total and self._done - numel >= self._first_held

    def hold(self, unit: int, num_bytes: float) -> None:
        self._held.append((unit, num_bytes))

    def write(self, after: float) -> None:
        """Write all that is held, once everything is read; what took memory last comes first."""
        if self._done < self._total - 1:  # pieces are fractions, which may not add up
            return
        after, end = max(after, self._clock.free[DISK_READ]), sum(size for _, size in self._held)
        for unit, size in reversed(self._held):
            written = self._clock.run(
                DISK_WRITE, self._costs.disk_write_s(size), after, f"state {unit}"
            )
            first = bisect_right(self._ends, end - size) - 1
            last = bisect_left(self._ends, end)
            for lender in range(first, last):
                self._free_at[lender] = max(self._free_at.get(lender, 0.0), written)
            end -= size
            self.written_at = written
        self._held.clear()

    def begin_step(self) -> None:
        self._done = 0.0

    def free_at(self, unit: int) -> float:
        """Return when the memory of a unit's gradient is its own again."""
        return self._free_at.get(unit, 0.0)
