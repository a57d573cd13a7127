"""When nothing fits: what is missing, and the nearest changes that would fit.

A change is named only after it was tried. None is made: a larger budget, fewer tokens, the disk or
a smaller format of optimizer state are the user's to choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outcore.errors import DoesNotFit
from outcore.machine.machine import Machine
from outcore.planning.change_words import command_line_words, python_words
from outcore.planning.changes import Changes, Needs
from outcore.planning.choices import TIERS
from outcore.planning.larger_machine import PRICES
from outcore.planning.plan import Job
from outcore.units import format_bytes

_NEARLY_THE_LEAST = 1.05


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the job with which a plan fits, as Python's arguments and as options."""

    what: str
    options: str
    job: Job


def refuse(
    job: Job,
    machine: Machine,
    limits: dict[str, int],
    needs: Needs,
    *,
    has_frozen_matrices: bool = False,
) -> DoesNotFit:
    """Return the error that says why ``job`` does not fit, and what would.

    has_frozen_matrices: of blocks, which could be kept in fewer bits.
    """
    wanted = needs(job)
    over = np.maximum(0, wanted - [limits[tier] for tier in TIERS])
    missing: dict[str, int] = {
        tier: int(num_bytes)
        for tier, num_bytes in zip(TIERS, over[_nearest(over)], strict=True)
        if num_bytes
    }
    lines = [
        f"{tier} needs {format_bytes(limits[tier] + num_bytes)}, {format_bytes(limits[tier])} are "
        f"available: {format_bytes(num_bytes)} are missing"
        for tier, num_bytes in missing.items()
    ]
    tried = Changes(job, machine, needs, has_frozen_matrices=has_frozen_matrices)
    changes = tuple(
        Change(
            what=python_words(job, changed, machine),
            options=command_line_words(job, changed, machine),
            job=changed,
        )
        for changed in tried.fitting()
    )
    reason = f"no plan fits: {', and '.join(lines)}."
    return DoesNotFit(
        f"{reason} {_advice([change.what for change in changes])}",
        missing_bytes=missing,
        changes=changes,
        command_line=f"{reason} {_advice([change.options for change in changes])}",
    )


def _nearest(over: NDArray[np.int64]) -> int:
    """Return the choice to tell of: what is missing costs little, in few tiers, on the device last.

    over: by choice and tier. What is missing can be parted between tiers in many ways, for nearly
    the same price; nobody adds a little of each, and memory of a device least of all.
    """
    total = over @ PRICES
    near = np.flatnonzero(total <= _NEARLY_THE_LEAST * total.min())
    num_tiers = (over[near] > 0).sum(axis=1)
    by_importance = num_tiers, over[near, TIERS.index("device")], total[near]
    return int(near[np.lexsort(by_importance[::-1])[0]])


def _advice(words: list[str]) -> str:
    if not words:
        return "Nothing that was tried would fit."
    return f"It would fit with: {'; '.join(words)}."
