"""What AdamW takes and what it refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import BETAS, LR, batch_of, offloaded
from torch import Tensor
from training import LLAMA, assert_equal, train, weights_of, with_optimizer

import outcore


def test_named_parameters() -> None:
    """As torch takes them, alone and in groups."""
    trained = []
    for groups in (
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: [{"params": model.named_parameters()}],
    ):
        model = offloaded(LLAMA.make())
        train(model, outcore.AdamW(groups(model), lr=LR), range(2))
        trained.append(weights_of(model))
    for other in trained[1:]:
        assert_equal(other, trained[0])


def test_how_torch_would_compute_changes_nothing() -> None:
    """Scripts that say so go on with this optimizer."""
    trained = []
    for options in ({}, {"fused": True}, {"foreach": False, "capturable": True, "amsgrad": False}):
        model = offloaded(LLAMA.make())
        train(model, outcore.AdamW(model, lr=LR, **options), range(2))
        trained.append(weights_of(model))
    for other in trained[1:]:
        assert_equal(other, trained[0])


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_another_algorithm_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=True: outcore.AdamW does not do that"):
        outcore.AdamW(offloaded(LLAMA.make()), **{option: True})


def test_an_argument_that_no_adamw_has() -> None:
    with pytest.raises(TypeError, match="no argument 'momentum'"):
        outcore.AdamW(offloaded(LLAMA.make()), momentum=0.9)


def test_a_scaler_of_gradients_is_refused_in_words_that_help() -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    for is_enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
        scaler.scale(model(**batch_of()).loss).backward()
        if is_enabled:
            with pytest.raises(outcore.OutcoreError, match="enabled=False"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        optimizer.zero_grad()
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_in_words_that_help(copied: Callable[[Any], Any]) -> None:
    """A copy would be made without the homes, and fail at its first step."""
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    with pytest.raises(TypeError, match="state_dict"):
        copied(optimizer)
    train(model, optimizer, range(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"on_non_finite": "ignore"}, "on_non_finite"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    model = offloaded(LLAMA.make())
    with pytest.raises(ValueError, match=message):
        outcore.AdamW(model, **arguments)
    outcore.AdamW(model)  # the refusal left nothing behind


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_another_algorithm_in_a_group_is_refused(option: str) -> None:
    model = offloaded(LLAMA.make())
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=f"{option}=True, which outcore.AdamW does not do"):
        outcore.AdamW([{"params": parameters, option: True}])
    with pytest.raises(TypeError, match="not a Tensor"):
        outcore.AdamW(parameters[0])
    outcore.AdamW([{"params": parameters, option: False}])


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("lr", [float("nan"), torch.tensor(float("inf"))])
def test_a_scheduler_that_went_wrong_is_named(lr: Any, during: bool) -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR, update_during_backward=during)
    optimizer.param_groups[0]["lr"] = lr
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"param group 0 has lr=(nan|inf)"):
        train(model, optimizer, range(1))
    assert_equal(weights_of(model), before)
    assert optimizer.num_steps == 0


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups.pop(0),
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
        lambda groups: groups.append({**groups[0], "params": [groups[0]["params"].pop()]}),
        lambda groups: groups.reverse(),
    ],
)
def test_param_groups_changed_by_hand_are_refused(
    change: Callable[[list[dict[str, Any]]], Any], during: bool
) -> None:
    """The groups of the update stay those that AdamW was given."""
    model = offloaded(LLAMA.make())
    halves = [list(model.parameters())[:7], list(model.parameters())[7:]]
    groups = [{"params": halves[0], "lr": LR}, {"params": halves[1], "lr": LR / 10}]
    optimizer = outcore.AdamW(groups, update_during_backward=during)
    train(model, optimizer, range(1))
    before = weights_of(model)
    given = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    change(optimizer.param_groups)
    with pytest.raises(outcore.OutcoreError, match="param_groups"):
        train(model, optimizer, range(1, 2))
    assert_equal(weights_of(model), before)
    optimizer.param_groups[:] = given
    optimizer.zero_grad()
    train(model, optimizer, range(1, 2))


def test_parameters_that_do_not_belong() -> None:
    model, other = offloaded(LLAMA.make()), offloaded(LLAMA.make())
    with pytest.raises(ValueError, match="offload"):
        outcore.AdamW(LLAMA.make())
    with pytest.raises(ValueError, match="two offloaded models"):
        outcore.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match="empty"):
        outcore.AdamW([])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        outcore.AdamW(model)


def test_a_second_optimizer_is_refused() -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model)
    with pytest.raises(outcore.OutcoreError, match="already"):
        outcore.AdamW(model)
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match="at once"):
        optimizer.add_param_group({"params": [model.lm_head.weight]})


def test_a_refused_option_leaves_the_model_free_for_another_optimizer() -> None:
    model = offloaded(LLAMA.make(), state="device")
    with pytest.raises(ValueError, match="on_non_finite"):
        outcore.AdamW(model, update_during_backward=True, on_non_finite="ignore")
    optimizer = outcore.AdamW(model)
    train(model, optimizer, range(1))


def test_state_that_does_not_fit_leaves_the_model_free_for_another_optimizer() -> None:
    reference = LLAMA.make()
    num_bytes = 4 * sum(p.numel() for p in reference.parameters())
    # Weights fit, and the two moments; the gradients do not.
    model = offloaded(reference, host_memory=int(3.9 * num_bytes))
    with pytest.raises(outcore.OutOfBudget, match="host memory"):
        outcore.AdamW(model)
    taken = outcore.engine_of(model).host_ledger.taken_bytes
    with pytest.raises(outcore.OutOfBudget, match="host memory"):
        outcore.AdamW(model)
    assert outcore.engine_of(model).host_ledger.taken_bytes == taken
    with torch.no_grad():
        model(**batch_of())


@pytest.mark.parametrize("passing", [False, True])
def test_a_refused_step_does_not_count(passing: bool) -> None:
    def run(refused: bool) -> dict[str, Tensor]:
        model = offloaded(LLAMA.make())
        optimizer = outcore.AdamW(model, lr=LR, update_during_backward=passing)
        group = optimizer.param_groups[0]
        if refused:
            group["betas"] = (0.9, 1.0)
            with pytest.raises(ValueError, match="beta2"):
                train(model, optimizer, range(1))
            assert optimizer.num_steps == 0
            optimizer.zero_grad()
        group["betas"] = BETAS
        train(model, optimizer, range(2))
        assert optimizer.num_steps == 2
        return weights_of(model)

    assert_equal(run(True), run(False))


def test_visits_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    model = offloaded(LLAMA.make(), num_visits=0)
    train(model, outcore.AdamW(model, lr=LR), range(1))
    peak = outcore.engine_of(model).device_ledger.peak_bytes
    room = 40_000  # for what lodges, and not for the visits
    model = offloaded(LLAMA.make(), num_visits=3, device_memory=peak + room)
    optimizer = outcore.AdamW(model, lr=LR)
    before = outcore.engine_of(model).device_ledger.taken_bytes
    with pytest.raises(outcore.OutOfBudget, match="state visits"):
        train(model, optimizer, range(1))
    assert optimizer.num_steps == 0
    assert outcore.engine_of(model).device_ledger.taken_bytes == before


def test_an_lr_that_is_a_tensor_belongs_to_one_optimizer() -> None:
    first, second = (outcore.AdamW(offloaded(LLAMA.make()), lr=torch.tensor(LR)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    second.param_groups[0]["lr"].fill_(0.5)  # as torch's schedulers do
    assert float(first.param_groups[0]["lr"]) == pytest.approx(LR)
