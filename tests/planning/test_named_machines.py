"""What a refusal names can be had: on this machine as it is, or by whoever buys the one named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from machines import GIB
from test_refusal import ASKED, NO_DISK, adapted

from outcore.errors import DoesNotFit
from outcore.machine.catalogue import catalogue_machine
from outcore.machine.machine import Machine
from outcore.model_spec import model_spec
from outcore.planning.device_type import computing_on_cpu, device_type
from outcore.planning.memory import largest_budgets
from outcore.planning.plan import Budgets, Job
from outcore.planning.search import fits, make_plan
from outcore.units import parse_bytes

_NAMED = re.compile(r"([\d.]+ [KMGT]iB) of (device memory|host memory|memory|disk) \(the machine")
_TYPED = re.compile(r"--(device|host)-memory (\S+)")


def with_named(machine: Machine, options: str) -> Machine:
    """Return exactly the machine that these words name."""
    has: dict[str, Any] = {}
    for size, what in _NAMED.findall(options):
        for tier in {"memory": ("device", "host"), "disk": ()}.get(what, (what.split()[0],)):
            has[f"{tier}_memory_bytes"] = parse_bytes(size)
        if what == "disk":
            has["disk_bytes"] = parse_bytes(size)
    return replace(machine, **has)


@pytest.mark.parametrize(
    "budgets",
    [NO_DISK, replace(NO_DISK, host_bytes=20 * GIB), Budgets(disk_bytes=0, device_bytes=4 * GIB)],
    ids=["none", "host", "device"],
)
@pytest.mark.parametrize(
    "name", ["rtx-4090", "h200-pcie5", "m4-max", "dgx-spark", "cpu-laptop", "v100-pcie3"]
)
@pytest.mark.parametrize(
    "shape", ["qwen2.5-7b", "qwen2.5-14b", "llama-3.1-70b", "gpt-oss-120b", "llama-3.1-70b, LoRA"]
)
def test_what_is_named_can_be_had(shape: str, name: str, budgets: Budgets) -> None:
    spec = adapted(shape.split(",")[0]) if "LoRA" in shape else model_spec(shape)
    machine, job = catalogue_machine(name), replace(ASKED, budgets=budgets)
    if device_type(machine) == "cpu":
        machine = computing_on_cpu(machine, device_memory=budgets.device_bytes)
        job = replace(job, dtype="fp32")
    try:
        make_plan(spec, machine, job)
    except DoesNotFit as refusal:
        for change in refusal.changes:
            check_here(change.options, machine)
            if _NAMED.search(change.options):
                check_named(change.options, change.job, machine, spec)


def check_here(options: str, machine: Machine) -> None:
    """What is to be typed in leaves the process and the system what they take."""
    for tier, size in _TYPED.findall(options):
        assert parse_bytes(size) <= largest_budgets(machine)[tier], options


def check_named(options: str, changed: Job, machine: Machine, spec: Any) -> None:
    bought = with_named(machine, options)
    # A device that is a part of a CPU's memory is one because it was asked for.
    is_cpu = device_type(machine) == "cpu"
    device_bytes = changed.budgets.device_bytes if is_cpu and not machine.is_unified else None
    unset = replace(changed.budgets, host_bytes=None, device_bytes=device_bytes)
    assert fits(spec, bought, replace(changed, budgets=unset)), options


def test_a_budget_that_leaves_nothing_for_the_process_is_a_larger_machine() -> None:
    """127.2 of 128 GiB were named as a budget of the host, and nothing left for the process."""
    machine, spec = catalogue_machine("rtx-4090"), model_spec("qwen2.5-7b")
    most = largest_budgets(machine)["host"]
    for num_layers in range(28, 48):
        larger = replace(spec, blocks=(*spec.blocks, *spec.blocks)[:num_layers])
        try:
            make_plan(larger, machine, replace(ASKED, budgets=replace(NO_DISK, host_bytes=8 * GIB)))
        except DoesNotFit as refusal:
            for change in refusal.changes:
                check_here(change.options, machine)
                assert (change.job.budgets.host_bytes or 0) <= most or "of host" in change.options
