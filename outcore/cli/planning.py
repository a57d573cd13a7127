"""Where `outcore plan` gets a model, a machine and a plan from: the parts of the planner by name.

Each is loaded when it is first called, so that help and mistakes answer without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from outcore.machine.machine import Machine
from outcore.plan.plan import Job, Plan


class Spec(Protocol):
    """What this command itself reads of a model spec."""

    @property
    def name(self) -> str: ...

    @property
    def num_parameters(self) -> int: ...


def model_spec(source: str) -> Spec:
    """Return what a directory, config or shape is made of; ValueError or OSError says why not."""
    spec: Spec = _call("outcore.model_spec", "model_spec", source)
    return spec


def machine_named(name: str) -> Machine:
    """Return a machine of the catalogue, or this one, measured, for "here"."""
    machine = _call("outcore.machine", "machine_named", name)
    assert isinstance(machine, Machine)
    return machine


def make_plan(spec: Spec, machine: Machine, job: Job) -> Plan:
    """Return the best plan; an ``OutcoreError`` says what is missing where nothing fits."""
    plan = _call("outcore.plan.search", "make_plan", spec, machine, job)
    assert isinstance(plan, Plan)
    return plan


def _call(module: str, function: str, *arguments: Any) -> Any:
    return getattr(import_module(module), function)(*arguments)
