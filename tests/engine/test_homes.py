"""Homes where the user names none: those of a plan for a usual batch, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, Family, batch_of

import outcore
from outcore.engine.homes import USUAL_TOKENS, is_left_open, usual_homes, without_plan
from outcore.engine.offload import resolve_options
from outcore.errors import DoesNotFit
from outcore.machine import machine_named
from outcore.planning.plan import BlockPlan, Plan

OPEN: dict[str, Any] = {"weights": None, "state": None, "activations": None, "num_slots": 3}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_gets_homes_that_can_be_carried_out(family: Family) -> None:
    model = family.make()

    def make_plan(tokens: int, seq_len: int) -> Plan:
        return outcore.plan(
            model, tokens=tokens, seq_len=seq_len, machine="h200-pcie5", dtype="fp32"
        )

    options = usual_homes(OPEN, make_plan)
    assert options["activations"] == "auto"
    homes = {name: options[name] for name in ("weights", "state", "activations", "num_slots")}
    model = outcore.offload(model.train(), device="cpu", **homes)
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    model(**batch_of(family)).loss.backward()
    optimizer.step()
    blocks = [unit for unit in outcore.engine_of(model).units if unit.part.is_block]
    assert [unit.weights_home for unit in blocks] == options["weights"]
    assert [unit.state_home for unit in blocks] == options["state"]


def test_a_model_that_does_not_fit_is_divided() -> None:
    options = usual_homes(
        OPEN,
        lambda tokens, seq_len: outcore.plan(
            "qwen2.5-7b", tokens=tokens, seq_len=seq_len, machine="h200-pcie5"
        ),
    )
    assert set(options["weights"]) == set(options["state"]) == {"device", "host"}


def test_fewer_tokens_are_tried_where_a_usual_batch_does_not_fit() -> None:
    tried: list[int] = []

    def make_plan(tokens: int, seq_len: int) -> Plan:
        tried.append(tokens)
        if tokens == USUAL_TOKENS[0]:
            raise DoesNotFit("too small", missing_bytes={"device": 1})
        return a_plan("recompute", "keep")

    options = usual_homes(OPEN, make_plan)
    assert tried == list(USUAL_TOKENS)
    assert options["weights"] == ["device", "host"]
    assert options["state"] == ["host", "host"]
    assert options["activations"] == "auto"
    assert options["num_slots"] == 2


def test_what_does_not_fit_at_all_gets_the_defaults() -> None:
    def make_plan(tokens: int, seq_len: int) -> Plan:
        raise DoesNotFit("too small", missing_bytes={"device": 1})

    assert usual_homes(OPEN, make_plan) == without_plan(OPEN)


@pytest.mark.parametrize(
    ("kept", "expected"), [(10, "auto"), (9, ["offload", "recompute"])], ids=["room", "no room"]
)
def test_inputs_that_the_plan_sends_away_stay_if_there_is_room(kept: int, expected: Any) -> None:
    sizes = {"device": {"kept activations": kept}, "host": {"block inputs": 10}}
    plan = replace(a_plan("offload", "keep"), peak_bytes=sizes)
    assert usual_homes(OPEN, lambda tokens, seq_len: plan)["activations"] == expected


def test_a_usual_batch_refuses_nothing_that_another_batch_could_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More sequences at a time than it has, or budgets of more than is free just now."""
    monkeypatch.setattr("outcore.engine.options.here", lambda **_: machine_named("rtx-4090"))
    monkeypatch.setattr("outcore.engine.offload.computes_on_cuda", lambda _: True)
    asked = {"micro_batch": 64, "host_memory": "500GiB", "device": "cpu"}
    options, plan = resolve_options(FAMILIES[0].make(), **asked)
    assert plan is None
    assert options.micro_batch == 64
    assert options.host_memory_bytes == 500 << 30
    assert set(options.weights) == {"device"}  # of a plan


def test_on_the_cpu_device_nothing_is_planned() -> None:
    model = FAMILIES[0].make()
    options, plan = resolve_options(model, device="cpu")
    assert plan is None
    assert (options.weights, options.state, options.activations) == ("host", "host", "auto")


def test_one_home_that_is_named_leaves_the_defaults_to_the_others() -> None:
    assert is_left_open(OPEN)
    named = {**OPEN, "state": "device"}
    assert not is_left_open(named)
    assert without_plan(named) == {**named, "weights": "host", "activations": "auto"}


def a_plan(*activations: Any) -> Plan:
    first, second = activations
    plan = outcore.plan(
        "smollm2-135m", tokens=2048, seq_len=2048, machine="h200-pcie5", dtype=torch.bfloat16
    )
    blocks = (
        BlockPlan(weights="device", state="host", activations=first),
        BlockPlan(weights="host", state="host", activations=second),
    )
    return replace(plan, blocks=blocks, num_slots=2)
