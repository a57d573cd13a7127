"""offload(plan=...) carries out exactly the plan that it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME

import outcore
from outcore.plan.plan import BlockPlan, Budgets, Job, Plan, Prediction

PREDICTION = Prediction(
    step_s=1.0, tokens_per_s=1.0, tflops=1.0, busy_s={}, binding_lane="compute", hiding_tokens=None
)
BLOCKS = (
    BlockPlan(weights="device", state="device", activations="recompute"),
    BlockPlan(weights="host", state="host", activations="offload"),
    BlockPlan(weights="host", state="host", activations="keep"),
)


def make_plan(blocks: tuple[BlockPlan, ...] = BLOCKS, **changes: Any) -> Plan:
    job = Job(tokens=32, seq_len=8, dtype="fp32", budgets=Budgets(device_bytes=8 << 20))
    values: dict[str, Any] = {
        "model": "tiny",
        "machine": "here",
        "job": job,
        "blocks": blocks,
        "edge_state": "device",
        "micro_batch": 2,
        "num_slots": 1,
        "num_visits": 2,
        "prediction": PREDICTION,
    }
    return Plan(**{**values, **changes})


def test_every_choice_of_the_plan_is_carried_out() -> None:
    model = outcore.offload(BY_NAME["llama"].make().train(), plan=make_plan(), device="cpu")
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    ids = torch.randint(0, 90, (4, 8))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = outcore.engine_of(model)
    blocks = [unit for unit in engine.units if unit.part.is_block]
    assert [unit.weights_home for unit in blocks] == ["device", "host", "host"]
    assert [unit.state_home for unit in blocks] == ["device", "host", "host"]
    edges = [unit for unit in engine.units if not unit.part.is_block]
    assert {(unit.weights_home, unit.state_home) for unit in edges} == {("device", "device")}
    assert engine.slots.num_slots == 1
    assert engine.backend.num_visits == 2
    assert engine.policy.num_kept == 1
    assert engine.options.micro_batch == 2
    device, host = engine.report()
    assert device.budget_bytes == 8 << 20
    assert host.purposes["block inputs"] == 4 * 8 * model.config.hidden_size * 4
    outcore.release(model)


def test_a_plan_for_another_model_is_refused() -> None:
    model = BY_NAME["llama"].make()
    with pytest.raises(ValueError, match="2 entries, but the model has 3 blocks"):
        outcore.offload(model, plan=make_plan(BLOCKS[:2]), device="cpu")
    with pytest.raises(ValueError, match="num_slots is the plan's to decide"):
        outcore.offload(model, plan=make_plan(), device="cpu", num_slots=2)
    with pytest.raises(ValueError, match="the plan is for dtype"):
        outcore.offload(model, plan=make_plan(), device="cpu", dtype=torch.bfloat16)
    outcore.release(outcore.offload(model, plan=make_plan(), device="cpu"))
