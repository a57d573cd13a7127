"""Every placement trains to the bits of the resident run, and the harness notices when not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from delayed_runs import train_at_once
from exactness_models import BOTH, MODELS, MORE_PLACEMENTS, gpt2, llama, t5

import outcore
from outcore.stream.lanes import injected_delays
from outcore.stream.slots import Slots
from outcore.stream.unit import Unit
from outcore.verify import (
    VerifyJob,
    compare_with_plain_torch,
    disk_placements,
    placements,
    verify,
)
from outcore.verify.exactness import (
    RESIDENT,
    Placement,
    batches,
    compare,
    param_groups,
    train,
)


@pytest.mark.parametrize("name", MODELS)
def test_every_placement_has_the_bits_of_the_resident_run(name: str) -> None:
    chosen = [p for p in placements() if not p.max_delay_s] + MORE_PLACEMENTS
    for comparison in verify(MODELS[name], VerifyJob(steps=20), chosen):
        assert comparison.num_tensors > 60
        assert comparison.is_exact, f"{comparison.name}: {comparison.differing[:5]}"


@pytest.mark.parametrize("name", MODELS)
def test_a_disk_tier_does_not_show(name: str, tmp_path: Path) -> None:
    job = VerifyJob(steps=8, disk=str(tmp_path))
    for comparison in verify(MODELS[name], job, disk_placements(max_delay_s=0.003)):
        assert comparison.is_exact, f"{comparison.name}: {comparison.differing[:5]}"
    assert list(tmp_path.iterdir()) == []


def test_random_delays_do_not_show() -> None:
    """Delays of up to 50 ms a copy and update, over 20 steps: time that is slept, not computed.

    So all placements are trained at once, each in a process of its own.
    """
    delayed = [replace(p, max_delay_s=0.05) for p in placements() + MORE_PLACEMENTS]
    runs = train_at_once("gpt2", VerifyJob(steps=20), [RESIDENT, *delayed])
    for placement in delayed:
        comparison = compare(placement.name, runs[placement.name], runs[RESIDENT.name])
        assert comparison.is_exact, f"{comparison.name}: {comparison.differing[:5]}"


@pytest.mark.parametrize(
    "options",
    [
        {**BOTH, "num_slots": 1, "activations": "recompute"},
        {**BOTH, "num_slots": 2, "activations": "keep", "num_visits": 2},
        {**BOTH, "num_slots": 4, "num_visits": 1},
        {"weights": "device", "state": "host", "num_visits": 2},
        {"weights": "host", "state": "device"},
    ],
    ids=["1-slot", "2-slots-kept-visits", "4-slots-visit", "resident-visits", "device-state"],
)
def test_random_delays_in_an_encoder_and_a_decoder(options: dict[str, Any]) -> None:
    job = VerifyJob(steps=2)
    placement = Placement(name="delayed", options=options, max_delay_s=0.05)
    (comparison,) = verify(t5, job, [placement])
    assert comparison.is_exact, comparison.differing[:5]


@pytest.mark.parametrize("seed", range(2))
def test_short_random_delays_over_many_steps(seed: int) -> None:
    job = VerifyJob(steps=20, seed=seed)
    chosen = [
        Placement(
            name=f"{slots} slots",
            options={**BOTH, "num_slots": slots, "num_visits": visits},
            max_delay_s=0.002,
        )
        for slots, visits in ((1, 0), (2, 2), (3, 1), (4, 3))
    ]
    for comparison in verify(gpt2, job, chosen):
        assert comparison.is_exact, f"{comparison.name}: {comparison.differing[:5]}"


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_bf16_storage(name: str) -> None:
    """bf16 weights with an fp32 master split into weight and remainder: few steps, bf16 is slow."""
    job = VerifyJob(steps=4, seq_len=8, dtype=torch.bfloat16)
    chosen = [p for p in placements(max_delay_s=0.005) if "slot" not in p.name]
    # Without oneDNN: its AMX kernels are illegal instructions in some sandboxes.
    with torch.backends.mkldnn.flags(enabled=False):
        for comparison in verify(MODELS[name], job, chosen):
            assert comparison.num_tensors > 80, "no remainders"
            assert comparison.is_exact, f"{comparison.name}: {comparison.differing[:5]}"


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "options",
    [
        {**BOTH, "num_slots": 2},
        {**BOTH, "num_slots": 1, "num_visits": 2},
        {"weights": "device", "state": "host", "num_visits": 1},
        "mixed",
    ],
    ids=["streamed", "visits", "resident", "mixed"],
)
@pytest.mark.parametrize("max_delay_s", [0.0, 0.002])
def test_updates_during_the_backward(
    name: str, options: dict[str, Any] | str, max_delay_s: float
) -> None:
    if isinstance(options, str):
        num_blocks = MODELS[name]().config.num_hidden_layers
        options = {
            "weights": [("host", "device")[i % 2] for i in range(num_blocks)],
            "state": [("device", "device", "host")[i % 3] for i in range(num_blocks)],
        }
    job = VerifyJob(steps=6, max_grad_norm=None)
    reference = train(MODELS[name], RESIDENT, job)
    losses, weights = _train_passing(MODELS[name], job, options, max_delay_s)
    assert losses == reference.losses
    resident = _final_weights(MODELS[name], job)
    assert [n for n in resident if not torch.equal(resident[n], weights[n])] == []


def _final_weights(make_model: Callable[[], Any], job: VerifyJob) -> dict[str, torch.Tensor]:
    return _train_passing(make_model, job, RESIDENT.options, 0.0, during=False)[1]


def _train_passing(
    make_model: Callable[[], Any],
    job: VerifyJob,
    options: dict[str, Any],
    max_delay_s: float,
    *,
    during: bool = True,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    from outcore.verify.exactness import run_steps

    torch.manual_seed(job.seed)
    model = outcore.offload(
        make_model().train(), device="cpu", dtype=job.dtype, micro_batch=2, **options
    )
    optimizer = outcore.AdamW(
        param_groups(model, job.weight_decay),
        lr=job.lr,
        betas=(0.9, 0.95),
        update_during_backward=during,
    )
    with injected_delays(max_delay_s, seed=1):
        losses = run_steps(model, optimizer, job)
        optimizer.synchronize()
    return losses, {name: t.clone() for name, t in model.state_dict().items()}


def test_against_plain_torch() -> None:
    """20 steps against plain Hugging Face and torch.optim.AdamW in fp32."""
    job = VerifyJob(steps=20)
    differences = compare_with_plain_torch(llama, job)
    assert max(differences.values()) <= 1e-5, max(differences, key=differences.__getitem__)


def test_dropout_is_on() -> None:
    """The exactness runs would prove less if dropout were off in them."""
    job = VerifyJob(steps=1)
    losses = {seed: train(gpt2, RESIDENT, VerifyJob(steps=1, seed=seed)).losses for seed in (0, 1)}
    model = gpt2().train()
    batch = next(batches(model, job))
    assert float(model(**batch).loss.detach()) != float(model(**batch).loss.detach())
    assert losses[0] != losses[1]


# The harness must be able to fail: each of these breaks the engine on purpose.

DELAYED = Placement(
    name="broken",
    options={**BOTH, "num_slots": 4, "activations": "recompute"},
    max_delay_s=0.003,
)


def _is_exact(placement: Placement = DELAYED, **job: Any) -> bool:
    try:
        (comparison,) = verify(llama, VerifyJob(steps=4, **job), [placement])
    except outcore.NonFiniteGradient:  # memory that was read before anything was copied into it
        return False
    return comparison.is_exact


def test_unbroken_reference_of_the_broken_ones() -> None:
    assert _is_exact()


def test_notices_copies_that_survive_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def update_without_a_new_version(self: Unit, fences: list[Any]) -> None:
        self.pending = fences

    monkeypatch.setattr(Unit, "update_queued", update_without_a_new_version)
    assert not _is_exact()


def test_notices_copies_that_do_not_wait_for_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    def update_without_waiting(self: Unit, fences: list[Any]) -> None:
        self.version += 1
        self.pending = []

    monkeypatch.setattr(Unit, "update_queued", update_without_waiting)
    assert not _is_exact()


def test_notices_compute_that_does_not_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = Slots.acquire

    def acquire_too_early(self: Slots, unit: Unit, phase: str) -> Any:
        monkeypatch.setattr("outcore.stream.lanes.Fence.before_compute", lambda self: None)
        try:
            return acquire(self, unit, phase)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(Slots, "acquire", acquire_too_early)

    monkeypatch.setattr(Slots, "acquire", acquire_too_early)
    assert not _is_exact()


def test_notices_recomputes_with_other_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resident run recomputes; a kept one does not, so a wrong random state must show."""
    monkeypatch.setattr("outcore.random_state.RandomState.restore", lambda self: None)
    assert not _is_exact(Placement(name="kept", options={**BOTH, "activations": "keep"}))


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize(
    "labels",
    [
        {"num_labels": 3},
        {"num_labels": 1},
        {"num_labels": 3, "problem_type": "multi_label_classification"},
    ],
)
def test_labels_fit_heads_of_classes(head: str, labels: dict[str, Any]) -> None:
    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        **labels,
    )
    model = getattr(hf, f"BertFor{head}")(config)
    job = VerifyJob(device="cpu", steps=2, sequences=4, seq_len=8)
    for batch in batches(model, job):
        assert model(**batch).loss.isfinite()
