"""A CPU as the device: its memory is the host's, and is counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade_plans import GIB, make_machine
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import outcore
from outcore.errors import DoesNotFit
from outcore.machine import machine_named
from outcore.machine.machine import Machine
from outcore.planning.device_type import computing_on_cpu, device_type, is_parted
from outcore.planning.plan import Plan

LAPTOP = replace(
    make_machine(device_name="CPU", name="here", is_unified=True),
    device_memory_bytes=22 * GIB,
    host_memory_bytes=22 * GIB,
)


def plan_on_cpu(
    shape: str, machine: Machine, device: str | int | None = None, host: str | int | None = None
) -> Plan:
    return outcore.plan(
        shape,
        tokens=1024,
        seq_len=512,
        machine=computing_on_cpu(machine, device_memory=device),
        device_memory=device,
        host_memory=host,
    )


def test_without_a_budget_it_is_one_memory_in_which_nothing_is_copied() -> None:
    machine = computing_on_cpu(LAPTOP, device_memory=None)
    assert machine.is_unified
    assert not is_parted(machine)
    plan = plan_on_cpu("qwen2.5-0.5b", LAPTOP)
    assert plan.tier_bytes("host") == 0
    assert plan.prediction.busy_s["to device"] == 0


def test_the_cpu_of_a_machine_with_a_gpu_has_the_host_s_memory() -> None:
    gpu = machine_named("h200-pcie5")
    machine = computing_on_cpu(gpu, device_memory=None)
    assert device_type(machine) == "cpu"
    assert machine.device_memory_bytes == machine.host_memory_bytes == gpu.host_memory_bytes


def test_what_takes_more_than_the_memory_is_refused_though_each_half_would_fit() -> None:
    """Weights, gradients and state of 1.5 billion parameters in fp32 take 24 GiB alone."""
    for device in (None, "4GiB", "12GiB", "20GiB"):
        with pytest.raises(DoesNotFit):
            plan_on_cpu("qwen2.5-1.5b", LAPTOP, device)
    for device, host in (("12GiB", "20GiB"), ("20GiB", "24GiB")):  # also where one asks for more
        with pytest.raises(DoesNotFit):
            plan_on_cpu("qwen2.5-1.5b", LAPTOP, device, host)


@settings(max_examples=25, deadline=None)
@given(
    memory=st.integers(6 * GIB, 64 * GIB),
    device_share=st.floats(0.02, 0.98),
    host_share=st.none() | st.floats(0.02, 1.0),
)
def test_both_parts_together_are_never_more_than_the_memory(
    memory: int, device_share: float, host_share: float | None
) -> None:
    machine = replace(LAPTOP, device_memory_bytes=memory, host_memory_bytes=memory)
    host = None if host_share is None else int(host_share * memory)
    try:
        plan = plan_on_cpu("qwen2.5-0.5b", machine, int(device_share * memory), host)
    except DoesNotFit:
        assume(False)
    assert plan.tier_bytes("device") + plan.tier_bytes("host") <= memory


def test_a_remedy_that_grows_one_part_leaves_enough_for_the_other() -> None:
    with pytest.raises(DoesNotFit, match=r'device_memory="([0-9.]+GiB)"') as caught:
        plan_on_cpu("qwen2.5-0.5b", LAPTOP, "1GiB")
    size = str(caught.value).split('device_memory="')[1].split('"')[0]
    plan = plan_on_cpu("qwen2.5-0.5b", LAPTOP, size)
    assert plan.tier_bytes("device") + plan.tier_bytes("host") <= LAPTOP.host_memory_bytes


def test_a_part_that_is_larger_than_the_whole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device_memory is 40.0 GiB, but only 22.0 GiB"):
        computing_on_cpu(LAPTOP, device_memory="40GiB")


def test_a_machine_by_name_is_parted_like_the_one_of_a_run() -> None:
    laptop = machine_named("cpu-laptop")
    for device in (None, "4GiB"):
        named = outcore.plan(
            "qwen2.5-0.5b", tokens=1024, seq_len=512, machine="cpu-laptop", device_memory=device
        )
        run = plan_on_cpu("qwen2.5-0.5b", laptop, device)
        assert named == run
        assert (named.tier_bytes("host") > 0) == (device is not None)
