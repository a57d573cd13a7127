"""How many steps each parameter has seen, which AdamW's bias correction depends on.

As in torch, what gets no gradient sees no step: a block that a forward skips is not counted on.
What arrives together (a block whole, an edge parameter by parameter) has one count; parameters
that rested while their block was updated, because they were frozen, have missed some of its steps.
Where all of them rested, the block has seen no step: its count can be told from theirs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outcore.optim.updates import Arrival
from outcore.store.spans import Field
from outcore.stream.unit import Unit


class StepCounts:
    """The counts of all parameters that are trained."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._parameters = [(unit, field) for unit in units for field in unit.layout.trainable]
        self._counts = {_arrival(unit, field): 0 for unit, field in self._parameters}
        self._missed: dict[tuple[int, str], int] = {}  # by unit and parameter
        self._arriving: dict[Arrival, set[str]] = {}
        for unit, field in self._parameters:
            self._arriving.setdefault(_arrival(unit, field), set()).add(field.name)

    def of(self, arrival: Arrival) -> int:
        """Return the steps that what arrives together has seen."""
        return self._counts[arrival]

    def of_parameter(self, unit: Unit, field: Field) -> int:
        return self._counts[_arrival(unit, field)] - self.missed(unit, field)

    def missed(self, unit: Unit, field: Field) -> int:
        """Return the steps of its block in which a parameter rested."""
        return self._missed.get((unit.index, field.name), 0)

    def advance(
        self, arrivals: Iterable[Arrival], resting: Callable[[int], frozenset[str]]
    ) -> None:
        """Count a step; ``resting``: by unit, the parameters of a block that are left out of it."""
        for arrival in arrivals:
            left_out = resting(arrival[0])
            if self._arriving[arrival] <= left_out:
                continue
            self._counts[arrival] += 1
            for name in left_out:
                key = arrival[0], name
                self._missed[key] = self._missed.get(key, 0) + 1

    def by_name(self) -> dict[str, int]:
        """Return the steps that each parameter has seen, by its full name."""
        return {u.full_name(f.name): self.of_parameter(u, f) for u, f in self._parameters}

    def check(self, counts: Any, num_steps: int) -> None:
        """Raise ValueError for what ``replace`` could not take after ``num_steps`` steps."""
        names = {unit.full_name(field.name) for unit, field in self._parameters}
        if not isinstance(counts, dict) or counts.keys() != names:
            raise ValueError("it counts the steps of other parameters")
        for name, count in counts.items():
            if type(count) is not int or not 0 <= count <= num_steps:
                raise ValueError(f"it has seen {num_steps} steps, and {name} {count!r} of them")

    def replace(self, counts: Mapping[str, int]) -> None:
        """Take counts by full name; what is not named has seen all steps of its block."""
        known = [
            (unit, field, counts[unit.full_name(field.name)])
            for unit, field in self._parameters
            if unit.full_name(field.name) in counts
        ]
        self._counts = dict.fromkeys(self._counts, 0)
        for unit, field, count in known:
            arrival = _arrival(unit, field)
            self._counts[arrival] = max(count, self._counts[arrival])
        self._missed = {
            (unit.index, field.name): self._counts[_arrival(unit, field)] - count
            for unit, field, count in known
            if count < self._counts[_arrival(unit, field)]
        }


def _arrival(unit: Unit, field: Field) -> Arrival:
    return unit.index, 0 if unit.arrives_whole else field.offset
