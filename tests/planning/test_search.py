"""Properties of plans over random machines, models and jobs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GIB, H200, jobs, machines, specs, tiny_spec

from outcore.errors import DoesNotFit, OutOfBudget
from outcore.machine.catalogue import catalogue_machine
from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec, model_spec
from outcore.planning.memory import budgets_of
from outcore.planning.plan import Budgets, Job, Plan
from outcore.planning.plan_json import plan_from_dict, plan_to_dict
from outcore.planning.search import fits, make_plan, simple_plans
from outcore.units import parse_bytes

# Plans whose predicted times differ by less are the same: a plainer one is preferred to a faster.
EQUAL = 1.01


def plan_or_refusal(spec: ModelSpec, machine: Machine, job: Job) -> Plan | DoesNotFit:
    try:
        return make_plan(spec, machine, job)
    except DoesNotFit as refusal:
        return refusal


@settings(max_examples=60, deadline=None)
@given(specs(), machines(), jobs())
def test_a_plan_keeps_its_budgets_and_beats_simple_policies(
    spec: ModelSpec, machine: Machine, job: Job
) -> None:
    plan = plan_or_refusal(spec, machine, job)
    if isinstance(plan, DoesNotFit):
        assert not simple_plans(spec, machine, job)
        return
    limits = budgets_of(machine, job.budgets)
    for tier, limit in limits.items():
        assert plan.tier_bytes(tier) <= limit
    for name, simple in simple_plans(spec, machine, job).items():
        assert plan.prediction.step_s <= simple.prediction.step_s, name
    assert plan.job == job


@settings(max_examples=50, deadline=None)
@given(
    specs(),
    machines(),
    jobs(),
    st.sampled_from(["device_memory_bytes", "host_memory_bytes", "disk_bytes"]),
    st.floats(1.05, 4),
)
def test_more_budget_is_never_slower(
    spec: ModelSpec, machine: Machine, job: Job, memory: str, factor: float
) -> None:
    plan = plan_or_refusal(spec, machine, job)
    if isinstance(plan, DoesNotFit):
        return
    larger = replace(machine, **{memory: int(getattr(machine, memory) * factor)})
    more = make_plan(spec, larger, job)
    if uses_disk(plan) and not uses_disk(more):
        return  # the disk wears: it is left alone where it is not needed, faster or not
    assert more.prediction.step_s <= plan.prediction.step_s * EQUAL


def uses_disk(plan: Plan) -> bool:
    return any(block.weights == "disk" or block.state == "disk" for block in plan.blocks)


def test_a_disk_that_is_not_needed_is_left_alone() -> None:
    """Also where state on it would make room for more kept activations, and a shorter step."""
    spec, machine = model_spec("gemma-3-4b"), catalogue_machine("m4-max")
    needs_it, does_not = (
        make_plan(
            spec,
            machine,
            Job(
                tokens=8192,
                seq_len=8192,
                clipping="none",
                budgets=Budgets(host_bytes=gib * GIB, disk_bytes=500 * GIB),
            ),
        )
        for gib in (50, 52)
    )
    assert uses_disk(needs_it)
    assert not uses_disk(does_not)
    assert does_not.prediction.step_s > needs_it.prediction.step_s


@settings(max_examples=40, deadline=None)
@given(specs(), machines(), jobs(), st.floats(0.002, 0.2), st.floats(0.002, 0.2))
def test_a_refusal_names_changes_that_fit(
    spec: ModelSpec, machine: Machine, job: Job, device_share: float, host_share: float
) -> None:
    small = Budgets(
        device_bytes=int(machine.device_memory_bytes * device_share),
        host_bytes=int(machine.host_memory_bytes * host_share),
        disk_bytes=0,
    )
    refusal = plan_or_refusal(spec, machine, replace(job, budgets=small))
    if not isinstance(refusal, DoesNotFit):
        return
    assert refusal.missing_bytes
    assert all(num_bytes > 0 for num_bytes in refusal.missing_bytes.values())
    assert refusal.changes
    for change in refusal.changes:
        assert change.what in str(refusal)
        make_plan(spec, machine, change.job)


@settings(max_examples=25, deadline=None)
@given(specs(), machines(), jobs())
def test_least_memory_is_less_and_hardly_slower(
    spec: ModelSpec, machine: Machine, job: Job
) -> None:
    fast = plan_or_refusal(spec, machine, job)
    if isinstance(fast, DoesNotFit):
        return
    lean = make_plan(spec, machine, replace(job, objective="memory"))
    assert lean.tier_bytes("device") <= fast.tier_bytes("device")
    assert lean.prediction.step_s <= 1.1 * fast.prediction.step_s * (1 + 1e-9)


def test_least_memory_is_looked_for_among_more_than_can_be_simulated() -> None:
    spec, machine = model_spec("mixtral-8x7b"), replace(H200, host_memory_bytes=3 << 40)
    job = Job(tokens=8192, seq_len=2048, budgets=Budgets(disk_bytes=0))
    fast = make_plan(spec, machine, job)
    lean = make_plan(spec, machine, replace(job, objective="memory"))
    assert lean.tier_bytes("device") < 0.6 * fast.tier_bytes("device")
    assert lean.prediction.step_s <= 1.1 * fast.prediction.step_s


@pytest.mark.parametrize("host", [1, 4, 16])
def test_least_memory_keeps_the_budget_of_the_host_too(host: int) -> None:
    """Inputs of blocks that keep their activations no longer may wait there."""
    spec, budgets = model_spec("qwen2.5-3b"), Budgets(host_bytes=host * GIB, disk_bytes=0)
    job = Job(tokens=32_768, seq_len=2048, objective="memory", budgets=budgets)
    assert make_plan(spec, H200, job).tier_bytes("host") <= host * GIB


def test_405b_with_every_choice_open_is_planned_in_5_s() -> None:
    spec = model_spec("llama-3.1-405b")
    machine = replace(H200, host_memory_bytes=3 << 40, disk_bytes=16 << 40)
    for clipping in ("waiting", "two-pass", "none"):
        start = time.process_time()
        plan = make_plan(spec, machine, Job(tokens=131_072, seq_len=2048, clipping=clipping))
        assert time.process_time() - start < 5
        assert {block.state for block in plan.blocks} >= {"host", "disk"}


def test_a_specification_of_the_largest_models_takes_seconds_at_most() -> None:
    start = time.process_time()
    assert len(model_spec("llama-3.1-405b").blocks) == 126
    assert len(model_spec("deepseek-v3").blocks) == 61
    assert time.process_time() - start < 4


def test_a_refusal_is_an_error_of_the_budget_and_says_what_is_missing() -> None:
    job = Job(tokens=32_768, seq_len=2048, budgets=Budgets(disk_bytes=0))
    with pytest.raises(OutOfBudget, match=r'missing.*would fit with.*state_format="compact"'):
        make_plan(model_spec("qwen2.5-32b"), H200, job)


def test_a_refusal_suggests_the_disk_where_it_was_left_out() -> None:
    budgets = Budgets(disk_bytes=0, host_bytes=20 * GIB, device_bytes=12 * GIB)
    job = Job(tokens=32_768, seq_len=2048, budgets=budgets)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model_spec("qwen2.5-3b"), H200, job)
    assert re.match(r'disk="PATH:[\d.]+GiB"$', caught.value.changes[0].what)


def test_a_unified_machine_copies_nothing() -> None:
    plan = make_plan(tiny_spec(), replace(H200, is_unified=True), Job(tokens=8192, seq_len=1024))
    assert {block.weights for block in plan.blocks} == {"device"}
    assert plan.prediction.busy_s["to device"] == plan.prediction.busy_s["to host"] == 0
    assert plan.tier_bytes("host") == 0


def test_one_memory_keeps_a_budget_of_the_host_too() -> None:
    spec, machine = tiny_spec(), replace(H200, is_unified=True)
    job = Job(tokens=8192, seq_len=1024, budgets=Budgets(disk_bytes=0))
    used = make_plan(spec, machine, job).tier_bytes("device")
    less = replace(job, budgets=replace(job.budgets, host_bytes=used * 9 // 10))
    assert make_plan(spec, machine, less).tier_bytes("device") <= used * 9 // 10
    none = replace(job, budgets=replace(job.budgets, host_bytes=1024))
    with pytest.raises(DoesNotFit) as refused:
        make_plan(spec, machine, none)
    assert refused.value.changes
    for change in refused.value.changes:
        assert 'host_memory="' in change.what
        assert "device_memory" not in change.what  # the budget that was given covers both
        make_plan(spec, machine, change.job)


def test_a_step_without_a_whole_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole sequence"):
        make_plan(tiny_spec(), H200, Job(tokens=1000, seq_len=2048))


def test_more_tokens_hide_the_link() -> None:
    """Below the tokens that the plan names, compute waits; from there on it does not."""
    spec = model_spec("qwen2.5-7b")
    job = Job(tokens=4096, seq_len=1024, budgets=Budgets(device_bytes=20 * GIB))
    plan = make_plan(spec, H200, job)
    assert plan.prediction.binding_lane != "compute"
    assert plan.prediction.hiding_tokens is not None
    assert 4096 < plan.prediction.hiding_tokens < 100_000


def test_types_and_formats_are_those_of_the_job() -> None:
    for state_format in ("fp32", "compact", "minimal"):
        job = Job(tokens=8192, seq_len=1024, state_format=state_format)
        assert make_plan(tiny_spec(), H200, job).job.state_format == state_format


def test_a_plan_survives_json() -> None:
    plan = make_plan(tiny_spec(), H200, Job(tokens=8192, seq_len=1024))
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan)))) == plan


@pytest.mark.parametrize(
    ("device", "host"), [(None, 40 * GIB), (20 * GIB, 110 * GIB), (9 * GIB, None), (2 * GIB, None)]
)
def test_printed_advice_is_true(device: int | None, host: int | None) -> None:
    """A budget that a refusal prints in brackets fits when it is given as printed."""
    spec = model_spec("qwen2.5-14b")
    budgets = Budgets(device_bytes=device, host_bytes=host, disk_bytes=0)
    job = Job(tokens=32_768, seq_len=2048, budgets=budgets)
    with pytest.raises(DoesNotFit) as refused:
        make_plan(spec, H200, job)
    advice = str(refused.value).split("It would fit with: ")[1].split("; ")
    here = [re.findall(r'(device|host)_memory="([^"]*)"', part) for part in advice]
    larger = [re.findall(r"([\d.]+ .iB) of (device|host) memory", part) for part in advice]
    sizes = [*here, *([(tier, size) for size, tier in part] for part in larger)]
    assert any(sizes)
    for printed in filter(None, sizes):
        given = {f"{tier}_bytes": parse_bytes(size) for tier, size in printed}
        changed = replace(job, budgets=replace(budgets, **given))
        assert fits(spec, H200, changed), printed
