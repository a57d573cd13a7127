"""Memory for checkpoints in the plan: counted where it fits, and never a reason to refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from machines import GIB, H200, jobs, machines, specs, tiny_spec

from outcore.errors import DoesNotFit
from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec
from outcore.planning.memory import budgets_of
from outcore.planning.plan import Budgets, Job
from outcore.planning.plan_json import plan_from_dict, plan_to_dict
from outcore.planning.search import SLOWER_FOR_CHECKPOINTS, make_plan
from outcore.views.words import job_sentence

SPEC = tiny_spec(num_blocks=12, block_parameters=40_000_000)
TRAINED = sum(b.trainable_numel for b in SPEC.blocks) + sum(e.trainable_numel for e in SPEC.edges)
JOB = Job(tokens=8192, seq_len=1024, budgets=Budgets(device_bytes=4 * GIB, disk_bytes=0))


@settings(max_examples=30, deadline=None)
@given(specs(), machines(), jobs())
def test_checkpoints_change_little_and_refuse_nothing(
    spec: ModelSpec, machine: Machine, job: Job
) -> None:
    asked = replace(job, checkpoints=True)
    try:
        plain = make_plan(spec, machine, job)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):
            make_plan(spec, machine, asked)
        return
    plan = make_plan(spec, machine, asked)
    assert plan.job == asked
    assert plan.prediction.step_s <= SLOWER_FOR_CHECKPOINTS * plain.prediction.step_s
    for tier, limit in budgets_of(machine, job.budgets).items():
        assert plan.tier_bytes(tier) <= limit
    if not plan.stages_checkpoints:
        assert replace(plan, job=job) == plain
    assert not plain.stages_checkpoints


def test_with_room_the_copy_is_in_the_books_and_nothing_else_changes() -> None:
    plain, plan = make_plan(SPEC, H200, JOB), make_plan(SPEC, H200, replace(JOB, checkpoints=True))
    assert plan.blocks == plain.blocks
    purposes = dict(plan.peak_bytes["host"])
    assert purposes.pop("checkpoint staging") == TRAINED * 12
    assert purposes == plain.peak_bytes["host"]
    assert "checkpoints while training goes on" in job_sentence(plan)
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_without_room_it_says_that_checkpoints_are_synchronous() -> None:
    used = make_plan(SPEC, H200, JOB).tier_bytes("host")
    tight = replace(JOB.budgets, host_bytes=used + (1 << 20))
    plan = make_plan(SPEC, H200, replace(JOB, budgets=tight, checkpoints=True))
    assert not plan.stages_checkpoints
    assert "synchronous checkpoints" in job_sentence(plan)
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_another_placement_makes_room_where_it_is_as_fast() -> None:
    """State that may as well be on the device leaves the host's memory to the copy."""
    roomy = replace(JOB, budgets=Budgets(device_bytes=8 * GIB, disk_bytes=0))
    plain = make_plan(SPEC, H200, roomy)
    host_bytes = plain.tier_bytes("host") + TRAINED * 12 - (256 << 20)
    budgets = replace(roomy.budgets, host_bytes=host_bytes)
    plan = make_plan(SPEC, H200, replace(roomy, budgets=budgets, checkpoints=True))
    assert plan.stages_checkpoints
    assert plan.tier_bytes("host") <= host_bytes
    assert plan.blocks != plain.blocks
