"""`outcore.plan` fills no more than the machine has, and refuses what is far more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machines import GIB

import outcore
from outcore.machine import machine_named
from outcore.planning.plan import Plan

CARD_BYTES = machine_named("rtx-4090").device_memory_bytes


def planned(shape: str = "qwen2.5-0.5b", machine: Any = "rtx-4090", **options: Any) -> Plan:
    return outcore.plan(shape, tokens=32_768, seq_len=2048, machine=machine, **options)


def test_a_budget_of_far_more_than_the_card_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device_memory: 80\.0 GiB is more than rtx-4090 has"):
        planned("llama-3.1-8b", device_memory="80GiB")


def test_what_a_card_is_sold_with_may_be_asked_for_and_is_not_filled() -> None:
    plan = planned("llama-3.1-8b", device_memory="25GiB")
    assert plan.job.budgets.device_bytes == CARD_BYTES
    assert plan.tier_bytes("device") <= CARD_BYTES
    assert planned(device_memory="8GiB").job.budgets.device_bytes == 8 * GIB


def test_a_budget_keeps_its_unit_on_the_way() -> None:
    with pytest.raises(outcore.DoesNotFit):
        planned(machine="cpu-laptop", device_memory="10KiB")


@pytest.mark.parametrize("name", ["m4-max", "cpu-laptop", "here"])
def test_memory_that_cannot_be_bought_is_refused_of_the_host_too(name: str) -> None:
    machine = name if name != "here" else replace(machine_named("rtx-4090"), name="here")
    with pytest.raises(ValueError, match=f"host_memory: 500.0 GiB is more than {name} has"):
        planned(machine=machine, host_memory="500GiB")


def test_a_machine_of_the_catalogue_can_have_more_host_memory_than_usual() -> None:
    with pytest.raises(outcore.DoesNotFit):
        planned("qwen2.5-14b")
    plan = planned("qwen2.5-14b", host_memory="256GiB")
    assert plan.job.budgets.host_bytes == 256 * GIB
    with pytest.raises(outcore.DoesNotFit, match=r"\(the machine has 256.0 GiB\)"):
        planned("llama-3.1-70b", host_memory="256GiB")


def test_no_more_sequences_at_a_time_than_a_step_has() -> None:
    with pytest.raises(ValueError, match="micro_batch: 64 sequences at a time, but a step has 16"):
        planned(micro_batch=64)
    assert planned(micro_batch=16).micro_batch == 16
