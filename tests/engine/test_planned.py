"""offload(plan=...) carries out exactly the plan that it gets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME

import outcore
from outcore.machine import machine_named
from outcore.machine.machine import Machine
from outcore.planning.plan import BlockPlan, Budgets, Job, Plan, Prediction, Span
from outcore.shapes import shape_config

PREDICTION = Prediction(
    step_s=1.0,
    tokens_per_s=1.0,
    tflops=1.0,
    busy_s={"compute": 1.0},
    binding_lane="compute",
    hiding_tokens=None,
    timeline=(Span(lane="compute", name="forward", start_s=0.0, end_s=1.0),),
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


def test_a_run_is_recorded_beside_its_plan(tmp_path: Path) -> None:
    model = outcore.offload(BY_NAME["llama"].make().train(), plan=make_plan(), device="cpu")
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    ids = torch.randint(0, 90, (4, 8))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with outcore.record(model) as run:
        step()
    with pytest.raises(ValueError, match="1 optimizer steps were recorded"):
        run.measurement()
    with outcore.record(model) as run:
        start = time.perf_counter()
        for _ in range(4):
            step()
        wall_s = time.perf_counter() - start
        outcore.synchronize(model)
    measured = run.measurement()
    assert 0 < measured.step_s < wall_s
    forwards = [span.name for span in measured.spans if span.name.startswith("forward")]
    assert forwards == [f"forward model.layers.{i}" for i in range(3)] + ["forward model.norm"]
    assert all(0 <= span.start_s <= span.end_s <= measured.step_s for span in measured.spans)
    assert measured.peak_bytes["device"] == outcore.engine_of(model).device_peak_bytes()
    rows = outcore.report(model, run, html=tmp_path / "run.html")
    assert [row.what for row in rows[:2]] == ["step", "speed"]
    assert "device peak without working memory" in [row.what for row in rows]
    assert (tmp_path / "run.html").read_text().count("<svg") >= 2
    run.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(run.spans()) + 1  # the predicted one
    outcore.release(model)


def test_what_a_refusal_of_offload_names_can_be_given_to_offload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outcore.engine.options.here", lambda **_: machine_named("h200-pcie5"))
    step: dict[str, Any] = {"device": "cpu", "tokens": 4096, "seq_len": 2048}
    step |= {"device_memory": "24GiB", "host_memory": "100GiB"}
    with pytest.raises(outcore.DoesNotFit) as caught:
        outcore.from_config(shape_config("qwen2.5-7b"), **step)
    message = str(caught.value)
    assert 'state_format="compact" and dtype="bf16"' in message
    assert 'clipping="two-pass"' in message
    assert message.endswith("For clipping, give plan=outcore.plan(..., clipping=...).")
    small = {"device": "cpu", "tokens": 32, "seq_len": 8, "device_memory": "256MiB"}
    model = BY_NAME["llama"].make().train()
    model = outcore.offload(model, **small, state_format="compact", dtype="bf16")
    assert outcore.engine_of(model).options.dtype is torch.bfloat16
    outcore.release(model)


@pytest.mark.filterwarnings("error:a block's activations")  # it is planned as a CPU's
def test_offload_makes_a_plan_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.engine.options.here", lambda **_: machine_named("h200-pcie5"))
    model = BY_NAME["llama"].make().train()
    model = outcore.offload(model, device="cpu", device_memory="256MiB", tokens=32, seq_len=8)
    engine = outcore.engine_of(model)
    assert engine.plan is not None
    assert engine.plan.job.budgets.device_bytes == 256 << 20
    homes = [unit.weights_home for unit in engine.units if unit.part.is_block]
    assert homes == [block.weights for block in engine.plan.blocks]
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    ids = torch.randint(0, 90, (4, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    outcore.release(model)
    with pytest.raises(outcore.DoesNotFit, match="no plan fits"):
        outcore.offload(model, device="cpu", device_memory="10KiB", tokens=32, seq_len=8)
    with pytest.raises(ValueError, match="belong together"):
        outcore.offload(model, device="cpu", tokens=32)


def test_compact_state_on_a_cpu_is_planned_in_the_type_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outcore.engine.options.here", lambda **_: machine_named("h200-pcie5"))
    model = BY_NAME["llama"].make()
    model = outcore.offload(model, device="cpu", state_format="compact", tokens=32, seq_len=8)
    assert outcore.engine_of(model).options.dtype == torch.bfloat16
    outcore.release(model)


def test_the_disk_that_is_named_is_the_one_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []

    def here(*, disk: Path | None, **_: Any) -> Machine:
        measured.append(disk)
        return machine_named("h200-pcie5")

    monkeypatch.setattr("outcore.engine.options.here", here)
    options = {"device": "cpu", "tokens": 32, "seq_len": 8}
    outcore.release(outcore.offload(BY_NAME["llama"].make(), disk=f"{tmp_path}:1GiB", **options))
    assert measured == [tmp_path]


def test_what_the_plan_decides_is_not_given_again() -> None:
    model = BY_NAME["llama"].make()
    with pytest.raises(ValueError, match="num_slots is the plan's to decide"):
        outcore.offload(model, plan=make_plan(), device="cpu", num_slots=2)
    with pytest.raises(ValueError, match="the plan is for dtype"):
        outcore.offload(model, plan=make_plan(), device="cpu", dtype=torch.bfloat16)
    outcore.release(outcore.offload(model, plan=make_plan(), device="cpu"))
