"""Larger machines: what they cost beside the one that there is, and which are worth naming."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outcore.machine.machine import Machine
from outcore.planning.memory import largest_budgets, machine_bytes
from outcore.planning.plan import Job

PRICES = (1000, 50, 1)  # of a byte, by TIERS: about $100, $5 and $0.1 a GB
_FAR = 10  # times the memory of the machine: named only where nothing nearer is
_WORTH_ONE_MORE = 0.8  # of what the larger machine costs without one more change


def cost(job: Job, machine: Machine) -> float:
    """Return what a job's budgets cost beyond the machine, in the price of a byte of a disk."""
    total = 0.0
    for price, (tier, most) in zip(PRICES, largest_budgets(machine).items(), strict=True):
        if tier == "host" and machine.is_unified and job.budgets.device_bytes is not None:
            continue  # of the same bytes
        budget = getattr(job.budgets, f"{tier}_bytes") or 0
        if budget > most:
            whole, has = (machine_bytes(tier, n, machine) for n in (budget, most))
            total += price * (whole - has)
    return total


def is_far(job: Job, machine: Machine) -> bool:
    """Whether a job's budgets are many times the machine's memory. A disk is soon added."""
    return (job.budgets.device_bytes or 0) > _FAR * machine.device_memory_bytes or (
        job.budgets.host_bytes or 0
    ) > _FAR * machine.host_memory_bytes


def simplest(jobs: Sequence[Job], machine: Machine) -> Job | None:
    """Return the first that costs hardly more than the cheapest. jobs: few changes first."""
    most = min((cost(job, machine) for job in jobs), default=0) / _WORTH_ONE_MORE
    return next((job for job in jobs if cost(job, machine) <= most), None)


def worth_naming(jobs: Iterable[Job], machine: Machine) -> list[Job]:
    """Return those that cost clearly less than all before them, the cheapest first.

    jobs: with few changes first.
    """
    named: list[Job] = []
    for job in jobs:
        if not named or cost(job, machine) < _WORTH_ONE_MORE * cost(named[0], machine):
            named.insert(0, job)
    near = [job for job in named if not is_far(job, machine)]
    return near or named
