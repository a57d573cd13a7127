"""Plans for LoRA over a base in 8 or 4 bit: their bytes are the run's, and what they predict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import lora

import outcore
from outcore.engine.offload import engine_of
from outcore.machine import machine_named
from outcore.model_spec import model_spec, spec_of_model
from outcore.planning.choices import Choice
from outcore.planning.cost import Costs
from outcore.planning.plan import Budgets, Job
from outcore.planning.plan_json import plan_from_dict, plan_to_dict
from outcore.planning.search import plan_of

H200 = machine_named("h200-pcie5")
NOT_IN_THE_BOOKS = {"working memory", "kept activations"}
CHOICES = {
    "all on host": Choice(num_slots=2),
    "some on device": Choice(first_device_weights=2, first_device_state=1, num_slots=1),
    "inputs on host": Choice(offloads_inputs=1),
    "weights on disk": Choice(last_disk_weights=2),
}


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *((name, "int4") for name in CHOICES),
        ("all on host", "int8"),
        ("all on host", None),
        ("weights on disk", None),
    ],
)
def test_the_plans_bytes_are_the_runs(name: str, format: Any, tmp_path: Path) -> None:
    model = lora.plain_model()
    spec = spec_of_model(model)
    job = Job(
        tokens=4 * 8,
        seq_len=8,
        dtype="fp32",
        frozen_weights=format,
        budgets=Budgets(disk_path=str(tmp_path)),
    )
    placement = CHOICES[name].placement(len(spec.blocks), micro_batch=2)
    plan = plan_of(spec, H200, job, placement)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    model = outcore.offload(model, plan=plan, device="cpu")
    lora.trained(model)
    for tier in engine_of(model).report():
        planned = {p: n for p, n in plan.peak_bytes[tier.tier].items()}
        found = {p: n for p, n in tier.purposes.items() if n}
        for books in (planned, found):
            for purpose in (*NOT_IN_THE_BOOKS, "block inputs" if "offload" in str(plan) else ""):
                books.pop(purpose, None)
        if tier.tier == "disk":
            planned, found = ({"all": sum(b.values())} for b in (planned, found))
        pages = 10 * 4096  # staging buffers are whole pages
        assert found == pytest.approx(planned, rel=0.02, abs=pages), tier.tier
    assert ("expanded weights" in plan.peak_bytes["device"]) == (format is not None)
    outcore.release(model)


def test_a_plan_for_a_model_that_is_born_with_adapters() -> None:
    plan = outcore.plan(
        lora.config(),
        adapters=lora.lora(),
        tokens=4 * 8,
        seq_len=8,
        machine="h200-pcie5",
        dtype="fp32",
        frozen_weights="int4",
        device_memory="256MiB",
        host_memory="64MiB",
    )
    model = outcore.from_config(lora.config(), adapters=lora.lora(), plan=plan, device="cpu")
    format = engine_of(model).options.frozen_weights
    assert format is not None
    assert format.name == "int4"
    lora.trained(model)
    with pytest.raises(ValueError, match="frozen_weights is the plan's"):
        outcore.from_config(
            lora.config(), adapters=lora.lora(), plan=plan, device="cpu", frozen_weights="int8"
        )


def test_a_plan_needs_something_frozen() -> None:
    job = {"tokens": 2048, "seq_len": 2048, "machine": "h200-pcie5"}
    with pytest.raises(ValueError, match="no block has a frozen matrix of 4,096 elements"):
        outcore.plan("qwen2.5-7b", frozen_weights="int4", **job)
    with pytest.raises(ValueError, match="int3"):
        outcore.plan("qwen2.5-7b", adapters=lora.lora(), frozen_weights="int3", **job)
    with pytest.raises(ValueError, match="leave adapters out"):
        outcore.plan(lora.plain_model(), adapters=lora.lora(), **job)


def test_what_adapters_change_in_the_numbers() -> None:
    """Frozen weights have no gradient of their own: two thirds of the operations, about."""
    whole, adapted = (model_spec("qwen2.5-7b", adapters=a) for a in (None, lora.lora(r=16)))
    assert adapted.step_flops(8, 2048) / whole.step_flops(8, 2048) == pytest.approx(2 / 3, rel=0.02)
    for ours, theirs in zip(adapted.blocks, whole.blocks, strict=True):
        assert ours.kept_elements_per_token == theirs.kept_elements_per_token + 7 * 16
        assert ours.trainable_parameters < 0.01 * ours.parameters
    job = Job(tokens=16384, seq_len=2048)
    costs = [Costs(spec, H200, job, 8).blocks[0].differentiate_s for spec in (whole, adapted)]
    assert 0.5 < costs[1] / costs[0] < 0.8
    packed = Costs(adapted, H200, replace(job, frozen_weights="int4"), 8).blocks[0]
    plain = Costs(adapted, H200, job, 8).blocks[0]
    expansion_s = packed.forward_s - plain.forward_s
    assert 0 < expansion_s < 0.02 * plain.forward_s
    frozen = adapted.blocks[0].expanded_numel("int4")
    assert expansion_s == pytest.approx(
        frozen * (2 + 4.5 / 8) / H200.device_memory_bytes_s, rel=0.01
    )


@pytest.mark.slow
def test_72b_over_a_small_device() -> None:
    """In bf16 its base alone, 140 GB, is more than the machine's host memory."""
    plan = outcore.plan(
        "qwen2.5-72b",
        adapters=lora.lora(r=16),
        frozen_weights="int4",
        tokens=32_768,
        seq_len=2_048,
        machine="h200-pcie5",
        device_memory="24GiB",
    )
    assert plan.prediction.tflops > 300
    assert plan.tier_bytes("device") < 24 << 30
    assert plan.peak_bytes["host"]["weights"] == pytest.approx(70.2e9 * 4.5 / 8, rel=0.03)
