"""The plan's bytes are the run's bytes: every purpose of every tier, for several placements."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from families import BY_NAME
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import outcore
from outcore.checkpoint.async_checkpoints import AsyncCheckpoints
from outcore.checkpoint.folder import CheckpointFolder
from outcore.engine.placement import MOVING_IN
from outcore.kernels.master import join_master
from outcore.machine import machine_named
from outcore.model_spec import spec_of_model
from outcore.planning.choices import Choice
from outcore.planning.device_type import computing_on_cpu
from outcore.planning.plan import Budgets, Clipping, Job, Plan
from outcore.planning.search import plan_of

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=1024,
)
# What the device's allocator makes on the way is not in the books of the CPU device, and what
# autograd keeps of a block on a CPU is not what the plan counts for a GPU.
NOT_IN_THE_BOOKS = {"working memory", "kept activations"}

CHOICES = {
    "all on host": Choice(num_slots=2),
    "some on device": Choice(first_device_weights=3, first_device_state=2, num_slots=1),
    "edges on device": Choice(first_device_weights=2, first_device_state=2, edge_state=0),
    "lodged": Choice(num_visits=6),
    "inputs on host": Choice(offloads_inputs=1),
    "state on disk": Choice(last_disk_state=4),
    "weights on disk": Choice(last_disk_weights=3),
    "resident, state on disk": Choice(first_device_weights=5, last_disk_state=3),
    "three tiers": Choice(
        first_device_weights=2,
        first_device_state=1,
        last_disk_weights=1,
        last_disk_state=3,
        offloads_inputs=1,
        num_visits=4,
    ),
}


def kept_share(model: Any, plan: Plan, ids: torch.Tensor) -> float:
    """Return what is kept of activations in a run of the plan, as a share of what it counts."""
    model = outcore.offload(model, plan=plan, device="cpu")
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*recomputed instead of kept")
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    kept = outcore.engine_of(model).report()[0].purposes["kept activations"]
    outcore.release(model)
    return kept / plan.peak_bytes["device"]["kept activations"]


@pytest.mark.parametrize("micro_batch", [1, 4, 5])
def test_a_last_micro_batch_that_is_smaller_keeps_what_the_plan_counts(micro_batch: int) -> None:
    model = BY_NAME["llama"].make().train()
    model.set_attn_implementation("sdpa")
    spec = spec_of_model(model)
    machine = computing_on_cpu(machine_named("h200-pcie5"), device_memory="1GiB")
    job = Job(tokens=5 * 24, seq_len=24, dtype="fp32")
    placement = Choice(last_kept=3).placement(3, micro_batch=micro_batch)
    plan = plan_of(spec, machine, job, placement)
    assert kept_share(model, plan, torch.randint(0, 90, (5, 24))) == pytest.approx(1, rel=0.02)


def test_dropouts_before_adapters_keep_what_the_plan_counts() -> None:
    """Each layer has its own, of the width that the layer takes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    model: Any = peft.get_peft_model(LlamaForCausalLM(CONFIG), adapters).train()
    machine = computing_on_cpu(machine_named("h200-pcie5"), device_memory=None)
    job = Job(tokens=4 * 64, seq_len=64, dtype="fp32")
    placement = Choice(last_kept=6).placement(6, micro_batch=4)
    plan = plan_of(spec_of_model(model), machine, job, placement)
    assert kept_share(model, plan, torch.randint(0, 1024, (4, 64))) == pytest.approx(1, rel=0.01)


def test_adapters_of_experts_keep_what_the_plan_counts() -> None:
    """PEFT adds them to all experts' matrices, and autograd keeps the sum: much, of few tokens."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(MixtralForCausalLM(config), adapters).train()
    spec = spec_of_model(model)
    router, *experts = sorted(spec.blocks[0].adapted_stacks)
    assert (router, experts) == (4 * 64, [4 * 64 * 256, 4 * 64 * 512])
    machine = replace(machine_named("h200-pcie5"), device_name="CPU: any")
    job = Job(tokens=4 * 4, seq_len=4, dtype="fp32")
    plan = plan_of(spec, machine, job, Choice(last_kept=2).placement(2, micro_batch=4))
    assert kept_share(model, plan, torch.randint(0, 256, (4, 4))) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("clipping", ["waiting", "two-pass", "none"])
@pytest.mark.parametrize("name", CHOICES)
def test_every_purpose_of_every_tier(name: str, clipping: Clipping, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG).train()
    spec = spec_of_model(model)
    job = Job(
        tokens=4 * 64,
        seq_len=64,
        clipping=clipping,
        dtype="fp32",
        budgets=Budgets(disk_path=str(tmp_path)),
        checkpoints=True,
    )
    placement = CHOICES[name].placement(len(spec.blocks), micro_batch=2)
    plan = plan_of(spec, machine_named("h200-pcie5"), job, placement)
    model = outcore.offload(model, plan=plan, device="cpu")
    optimizer = outcore.AdamW(
        model,
        lr=1e-3,
        max_grad_norm=None if clipping == "none" else 1.0,
        update_during_backward=clipping != "waiting",
    )
    checkpoints = AsyncCheckpoints(CheckpointFolder(tmp_path / "it"), model, optimizer)
    ids = torch.randint(0, 1024, (4, 64))

    def forward_and_backward() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    for _ in range(3):
        optimizer.step(forward_and_backward)
        optimizer.zero_grad()
    for tier in outcore.engine_of(model).report():
        planned = {
            purpose: num_bytes
            for purpose, num_bytes in plan.peak_bytes[tier.tier].items()
            if purpose not in NOT_IN_THE_BOOKS
        }
        found = {p: n for p, n in tier.purposes.items() if n and p not in NOT_IN_THE_BOOKS}
        if tier.tier == "disk":  # a plan may fill a disk's budget to the last byte
            assert sum(found.values()) == sum(planned.values())
            continue
        assert found == pytest.approx(planned, rel=0.02), tier.tier
    checkpoints.close()
    outcore.release(model)


@pytest.mark.parametrize("state_format", ["fp32", "compact", "minimal"])
@pytest.mark.parametrize("last_disk_weights", [0, 1, 3])
def test_of_one_memory_the_disk_holds_what_the_plan_counts(
    last_disk_weights: int, state_format: Any, tmp_path: Path
) -> None:
    """The masters of resident weights too, and the rest of each tensor's last page."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG).train()
    spec = spec_of_model(model)
    machine = computing_on_cpu(machine_named("h200-pcie5"), device_memory=None)
    choice = Choice(
        first_device_state=3,
        first_device_weights=6 - last_disk_weights,
        last_disk_state=3,
        last_disk_weights=last_disk_weights,
        edge_state=0,
    )
    dtype: Literal["bf16", "fp32"] = "fp32" if state_format == "fp32" else "bf16"
    job = Job(tokens=4 * 64, seq_len=64, dtype=dtype, state_format=state_format)
    placement = choice.placement(6, micro_batch=4)
    planned_bytes = plan_of(spec, machine, job, placement).tier_bytes("disk")
    budgets = Budgets(disk_path=str(tmp_path), disk_bytes=planned_bytes)
    plan = plan_of(spec, machine, replace(job, budgets=budgets), placement)
    model = outcore.offload(model, plan=plan, device="cpu", state_format=state_format)
    outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    (disk,) = (tier for tier in outcore.engine_of(model).report() if tier.tier == "disk")
    assert disk.peak_bytes == planned_bytes
    outcore.release(model)


@pytest.mark.parametrize("name", ["all on host", "some on device", "state on disk", "three tiers"])
def test_what_bf16_rounds_away_of_an_fp32_model_leaves_the_host_for_its_home(
    tmp_path: Path, name: str
) -> None:
    model, plan = _fp32_model_with_bf16_plan(tmp_path, name)
    model = outcore.offload(model, plan=plan, device="cpu")
    outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    held = outcore.engine_of(model).host_ledger.taken()
    assert held["optimizer state"] == pytest.approx(
        plan.peak_bytes["host"]["optimizer state"], rel=0.02
    )
    assert held.get(MOVING_IN, 0) == 0
    outcore.release(model)


def test_an_optimizer_that_was_refused_can_be_made_again_with_the_same_masters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = _fp32_model_with_bf16_plan(tmp_path, "three tiers")
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = outcore.offload(model, plan=plan, device="cpu")

    def refused(*args: Any, **options: Any) -> Any:
        raise outcore.OutOfBudget("no room")

    with monkeypatch.context() as patch:
        patch.setattr("outcore.optim.backend.build_on_host", refused)
        with pytest.raises(outcore.OutOfBudget):
            outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    state = optimizer.state_dict()["state"]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        remainder = state[index]["remainder"].reshape(parameter.shape)
        master = join_master(parameter.detach(), remainder)
        assert torch.equal(master, exact[name]), name
    outcore.release(model)


def _fp32_model_with_bf16_plan(tmp_path: Path, name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).train()
    spec = spec_of_model(model)
    job = Job(tokens=4 * 64, seq_len=64, budgets=Budgets(disk_path=str(tmp_path)))
    placement = CHOICES[name].placement(len(spec.blocks), micro_batch=2)
    return model, plan_of(spec, machine_named("h200-pcie5"), job, placement)
