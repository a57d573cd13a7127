"""When nothing fits: what is missing, and the nearest changes that would fit.

A change is named only after it was tried. None is made: a larger budget, fewer tokens, the disk or
a smaller format of optimizer state are the user's to choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outcore.errors import DoesNotFit
from outcore.machine.machine import Machine
from outcore.planning.choices import TIERS
from outcore.planning.memory import DEVICE_SLACK, budgets_of
from outcore.planning.plan import Budgets, Job, StateFormat, Tier
from outcore.units import format_bytes

Needs = Callable[[Job], NDArray[np.int64]]
"""Says what each choice takes in each tier, for a changed job: one row a choice, by TIERS."""

_OPTIONS = {"device": "device memory", "host": "host memory", "disk": "disk"}
_FORMATS: tuple[StateFormat, ...] = ("compact", "minimal")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the job with which a plan fits."""

    what: str
    job: Job


def refuse(job: Job, machine: Machine, limits: dict[str, int], needs: Needs) -> DoesNotFit:
    """Return the error that says why ``job`` does not fit, and what would."""
    wanted = needs(job)
    over = np.maximum(0, wanted - [limits[tier] for tier in TIERS])
    row = wanted[int(np.argmin(over.sum(axis=1)))]
    nearest: dict[str, int] = {
        tier: int(num_bytes) for tier, num_bytes in zip(TIERS, row, strict=True)
    }
    missing = _over(nearest, limits)
    changes = tuple(_changes(job, machine, limits, needs, wanted, nearest))
    lines = [
        f"{tier} needs {format_bytes(nearest[tier])}, {format_bytes(limits[tier])} are available: "
        f"{format_bytes(num_bytes)} are missing"
        for tier, num_bytes in missing.items()
    ]
    would_fit = "; ".join(change.what for change in changes)
    return DoesNotFit(
        f"no plan fits: {', and '.join(lines)}. It would fit with: {would_fit}.",
        missing_bytes=missing,
        changes=changes,
    )


def _over(need: dict[str, int], limits: dict[str, int]) -> dict[str, int]:
    return {t: need[t] - limits[t] for t in need if need[t] > limits[t]}


def _changes(
    job: Job,
    machine: Machine,
    limits: dict[str, int],
    needs: Needs,
    wanted: NDArray[np.int64],
    nearest: dict[str, int],
) -> list[Change]:
    """Try one change at a time; the nearest first, larger budgets of several tiers last."""

    def fits(changed: Job) -> bool:
        allowed = budgets_of(machine, changed.budgets)
        rows = needs(changed) <= [allowed[tier] for tier in TIERS]
        return bool(rows.all(axis=1).any())

    found: list[Change] = []
    if job.budgets.disk_bytes == 0 and machine.disk_bytes:
        with_disk = replace(job, budgets=replace(job.budgets, disk_bytes=None))
        if fits(with_disk):
            found.append(
                Change(what=f"the disk ({format_bytes(machine.disk_bytes)})", job=with_disk)
            )
    for tier in TIERS:
        larger = _larger_budget(job, limits, wanted, tier)
        if larger is not None and fits(larger.job):
            found.append(larger)
    found.sort(key=lambda change: _growth(change.job.budgets, limits))
    sequences = _most_sequences(job, fits)
    if sequences:
        tokens = sequences * job.seq_len
        fewer = replace(job, tokens=tokens)
        found.append(Change(what=f"{tokens:,} tokens a step instead of {job.tokens:,}", job=fewer))
    elif job.micro_batch is None or job.micro_batch > 1:
        smaller = replace(job, micro_batch=1)
        if fits(smaller):
            found.append(Change(what="micro_batch=1", job=smaller))
    if job.clips:
        passing = replace(job, clips=False)
        if fits(passing):
            found.append(Change(what="updates during the backward, without clipping", job=passing))
    if job.state_format == "fp32":
        for state_format in _FORMATS:
            compact = replace(job, state_format=state_format)
            if fits(compact):
                found.append(Change(what=f"state_format={state_format!r}", job=compact))
                break
    if not found:
        everywhere = _budgets(job, {t: max(nearest[t], limits[t]) for t in nearest})
        more = replace(job, budgets=everywhere)
        if fits(more):
            names = ", ".join(
                f"{format_bytes(getattr(everywhere, f'{t}_bytes') - _budget_for(t, limits[t]))} "
                f"more {_OPTIONS[t]} ({format_bytes(getattr(everywhere, f'{t}_bytes'))})"
                for t in _over(nearest, limits)
            )
            found.append(Change(what=names, job=more))
    return found


def _larger_budget(
    job: Job, limits: dict[str, int], wanted: NDArray[np.int64], tier: Tier
) -> Change | None:
    """Return the least growth of one tier's budget with which some choice fits."""
    index = TIERS.index(tier)
    fits = wanted <= [limits[t] for t in TIERS]
    fits[:, index] = True
    alone = wanted[fits.all(axis=1), index]
    if not len(alone):
        return None
    budgets = _budgets(job, {tier: int(alone.min())})
    budget = getattr(budgets, f"{tier}_bytes")
    more = budget - _budget_for(tier, limits[tier])
    text = f"{format_bytes(more)} more {_OPTIONS[tier]} ({format_bytes(budget)})"
    return Change(what=text, job=replace(job, budgets=budgets))


def _budgets(job: Job, num_bytes: dict[str, int]) -> Budgets:
    """Return budgets of which ``num_bytes`` can be filled, as they are printed."""
    changed = {
        f"{tier}_bytes": _round_up(_budget_for(tier, value)) for tier, value in num_bytes.items()
    }
    return replace(job.budgets, **changed)  # type: ignore[arg-type]


def _budget_for(tier: str, num_bytes: int) -> int:
    """Return the budget of which ``num_bytes`` can be filled: of the device's, not all can."""
    return int(num_bytes / (1 - DEVICE_SLACK)) + 1024 if tier == "device" else num_bytes


def _round_up(num_bytes: int) -> int:
    """Return the next number that is printed with one decimal and read back as no less."""
    unit = 1024.0
    while num_bytes >= 1024 * unit:
        unit *= 1024
    return math.ceil(math.ceil((num_bytes + 16) / unit * 10) * unit / 10) + 8


def _growth(budgets: Budgets, limits: dict[str, int]) -> float:
    asked: dict[str, int | None] = {t: getattr(budgets, f"{t}_bytes") for t in limits}
    return sum(value / max(1, limits[t]) for t, value in asked.items() if value is not None)


def _most_sequences(job: Job, fits: Callable[[Job], bool]) -> int:
    """Return the most sequences a step, fewer than asked, that fit; 0 if one does not."""

    def with_sequences(sequences: int) -> Job:
        return replace(job, tokens=sequences * job.seq_len)

    low, high = 0, job.sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(with_sequences(middle)) else (low, middle - 1)
    return low
