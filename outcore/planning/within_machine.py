"""Budgets beside what a machine has: no plan fills more, and what is far more is refused.

For whoever asks for a plan. ``make_plan`` itself takes any budget, because a refusal tries larger
ones; no disk is looked at here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outcore.machine.machine import Machine
from outcore.machine.named import HERE
from outcore.planning.plan import Budgets
from outcore.units import format_bytes

_SOLD_WITH_MORE = 1.1  # times what there is, at most, may be asked for


class TooMuch(ValueError):
    """An argument asks for more than there is: its name in Python, and why it is refused."""

    def __init__(self, argument: str, why: str) -> None:
        super().__init__(f"{argument}: {why}")
        self.argument = argument
        self.why = why


def with_asked_memory(machine: Machine, budgets: Budgets) -> Machine:
    """Return a machine of the catalogue with the host memory that was asked for.

    The catalogue has what such a machine usually has, and memory can be bought; a card's cannot.
    """
    usual, asked = machine.host_memory_bytes, budgets.host_bytes or 0
    if machine.name == HERE or machine.is_unified or asked <= usual:
        return machine
    return replace(machine, host_memory_bytes=asked)


def budgets_within(budgets: Budgets, machine: Machine) -> Budgets:
    """Return budgets of no more memory than the machine has; refuse what is far more.

    A plan for more could not be carried out. Cards have a little less than they are sold with.
    """
    memory: dict[str, Any] = {}
    for tier, asked, has_bytes in (
        ("device", budgets.device_bytes, machine.device_memory_bytes),
        ("host", budgets.host_bytes, machine.host_memory_bytes),
    ):
        if asked is None:
            continue
        if asked > _SOLD_WITH_MORE * has_bytes:
            raise TooMuch(
                f"{tier}_memory",
                f"{format_bytes(asked)} is more than {machine.name} has, {format_bytes(has_bytes)}",
            )
        memory[f"{tier}_bytes"] = min(asked, has_bytes)
    return replace(budgets, **memory)


def check_micro_batch(micro_batch: int | None, sequences: int) -> None:
    """Refuse more sequences at a time than a step has."""
    if micro_batch is not None and micro_batch > sequences:
        raise TooMuch(
            "micro_batch", f"{micro_batch} sequences at a time, but a step has {sequences}"
        )
