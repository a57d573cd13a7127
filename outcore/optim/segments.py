"""Which elements of a unit are updated alike: a param group's, with the same count of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outcore.errors import OutcoreError
from outcore.optim.step_counts import StepCounts
from outcore.optim.updates import Segment
from outcore.store.spans import ALIGN_ELEMENTS
from outcore.stream.unit import Unit


class Segments:
    """Finds each unit's segments once, and again when other parameters rest."""

    def __init__(self, param_groups: Sequence[dict[str, Any]], counts: StepCounts) -> None:
        self._group_of = _group_of(param_groups)
        self._counts = counts
        self._found: dict[int, tuple[frozenset[str], list[Segment]]] = {}

    def refuse_other_groups(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Raise OutcoreError for parameters that were moved, taken out or added by hand."""
        if _group_of(param_groups) != self._group_of:
            raise OutcoreError(
                "optimizer.param_groups no longer has the groups and parameters that AdamW was "
                "given, and another choice of them would be ignored: put them back. To leave "
                "parameters out, freeze them (requires_grad_(False)); what a group is trained "
                "with (lr, betas, weight_decay) can be changed in it at any time"
            )

    def of(self, unit: Unit, resting: frozenset[str]) -> list[Segment]:
        """Return the runs of elements of all parameters but those that rest."""
        known = self._found.get(unit.index)
        if known is None or known[0] != resting:
            known = self._found[unit.index] = resting, self._find(unit, resting)
        return known[1]

    def forget(self) -> None:
        """Say that the counts were replaced."""
        self._found.clear()

    def _find(self, unit: Unit, resting: frozenset[str]) -> list[Segment]:
        runs: list[Segment] = []
        for field in unit.layout.trainable:
            group = self._group_of.get(id(unit.parameters[field.name]))
            if group is None or field.name in resting:
                continue
            start, missed = field.offset, self._counts.missed(unit, field)
            last = runs[-1] if runs else None
            if (
                last is not None
                and (last.group, last.missed) == (group, missed)
                and start - last.end < ALIGN_ELEMENTS  # nothing but padding lies between
            ):
                start = runs.pop().start
            runs.append(Segment(start=start, end=field.end, group=group, missed=missed))
        return runs


def _group_of(param_groups: Sequence[dict[str, Any]]) -> dict[int, int]:
    return {id(p): g for g, group in enumerate(param_groups) for p in group["params"]}
