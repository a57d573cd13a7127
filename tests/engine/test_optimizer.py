"""outcore.AdamW is a torch optimizer: groups, schedules, state, norms, frozen parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import (
    BETAS,
    LR,
    batch_of,
    gradients_of,
    offloaded,
    relative_difference,
)
from torch import Tensor
from training import (
    LLAMA,
    PLACEMENTS,
    assert_equal,
    copied,
    train,
    weights_of,
    with_optimizer,
)

import outcore


def test_groups_and_schedulers() -> None:
    """Per-group lr, betas, eps and decay under torch's own schedulers."""

    def groups(model: Any) -> list[dict[str, Any]]:
        blocks = list(model.model.layers.parameters())
        of_blocks = {id(p) for p in blocks}
        rest = [p for p in model.parameters() if id(p) not in of_blocks]
        return [
            {"params": blocks[::2], "lr": 3e-3, "weight_decay": 0.3},
            {"params": blocks[1::2], "betas": (0.8, 0.99), "eps": 1e-6},
            {"params": rest, "lr": 1e-4, "weight_decay": 0.0},
        ]

    def schedule(optimizer: Any) -> Any:
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [3])

    plain = LLAMA.make()
    theirs = torch.optim.AdamW(groups(plain), lr=LR, betas=BETAS)
    expected = train(plain, theirs, range(6), schedule(theirs))
    for options in PLACEMENTS:
        model = offloaded(LLAMA.make(), **options)
        ours = outcore.AdamW(groups(model), lr=LR, betas=BETAS)
        assert isinstance(ours, torch.optim.Optimizer)
        assert train(model, ours, range(6), schedule(ours)) == pytest.approx(expected, rel=1e-5)
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
        outcore.synchronize(model)
        for name, parameter in plain.named_parameters():
            ours_now = dict(model.named_parameters())[name]
            assert relative_difference(ours_now, parameter) <= 1e-5, name


def test_one_cycle_changes_betas_too() -> None:
    plain, model = LLAMA.make(), offloaded(LLAMA.make())
    theirs = torch.optim.AdamW(plain.parameters(), lr=LR)
    ours = outcore.AdamW(model, lr=LR)
    runs = []
    for net, optimizer in ((plain, theirs), (model, ours)):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=6)
        runs.append(train(net, optimizer, range(5), schedule))
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 0.3, 1e6])
@pytest.mark.parametrize("options", PLACEMENTS)
def test_gradient_norm_and_clipping(max_grad_norm: float | None, options: dict[str, Any]) -> None:
    plain = LLAMA.make()
    plain(**batch_of()).loss.backward()
    limit = float("inf") if max_grad_norm is None else max_grad_norm
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), limit))
    torch.optim.AdamW(plain.parameters(), lr=LR, eps=1e-2).step()
    model = offloaded(LLAMA.make(), **options)
    # A large eps, so that the scale of a gradient shows in the step.
    optimizer = outcore.AdamW(model, lr=LR, eps=1e-2, max_grad_norm=max_grad_norm)
    model(**batch_of()).loss.backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
    outcore.synchronize(model)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_difference(ours, theirs) <= 1e-6, name


# Frozen parameters


def _only(*parts: str) -> Callable[[Any], None]:
    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))

    return freeze


def _all_but(*parts: str) -> Callable[[Any], None]:
    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in parts))

    return freeze


FREEZERS = {
    "embedding": _all_but("embed_tokens"),
    "first-blocks": _all_but("layers.0", "layers.1", "embed_tokens"),
    "middle-block": _all_but("layers.1"),
    "last-block-and-head": _all_but("layers.2", "lm_head", "model.norm"),
    "one-block-only": _only("layers.1"),
    "head-only": _only("lm_head"),
    "embedding-only": _only("embed_tokens"),
    "norms-only": _only("norm"),
    "a-matrix-in-each-block": _only("q_proj"),
}


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", FREEZERS)
def test_frozen_parameters(name: str, activations: str) -> None:
    plain = LLAMA.make()
    FREEZERS[name](plain)
    theirs = torch.optim.AdamW(plain.parameters(), lr=LR)
    norms = []
    theirs.register_step_pre_hook(
        lambda *_: norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
    )
    expected = train(plain, theirs, range(3))
    model = LLAMA.make()
    FREEZERS[name](model)
    model = offloaded(model, activations=activations)
    ours = outcore.AdamW(model, lr=LR, max_grad_norm=1.0)
    assert train(model, ours, range(3)) == pytest.approx(expected, rel=1e-5)
    assert ours.grad_norm == pytest.approx(norms[-1], rel=1e-4)
    outcore.synchronize(model)
    before = dict(LLAMA.make().named_parameters())
    for (key, parameter), reference in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert relative_difference(parameter, reference) <= 1e-5, key
        if not parameter.requires_grad:
            assert torch.equal(parameter, before[key]), key


def test_freezing_after_offload() -> None:
    """Parameters frozen later neither move nor count in the norm, or they are refused."""
    freeze = _all_but("layers.1")
    plain = LLAMA.make()
    freeze(plain)
    plain(**batch_of()).loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    model = offloaded(LLAMA.make())
    freeze(model)
    try:
        optimizer = outcore.AdamW(model, lr=LR, max_grad_norm=1.0)
    except ValueError:
        return
    model(**batch_of()).loss.backward()
    optimizer.step()
    outcore.synchronize(model)
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight, LLAMA.make().model.layers[1].mlp.up_proj.weight
    )
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)


def test_unfreezing_after_offload_is_not_ignored() -> None:
    """It trains them, or it says that it cannot: silence would be the worst."""
    model = LLAMA.make()
    model.model.layers[1].requires_grad_(False)
    model = offloaded(model)
    model.model.layers[1].requires_grad_(True)
    before = model.model.layers[1].mlp.up_proj.weight.detach().clone()
    try:
        optimizer = outcore.AdamW(model, lr=LR)
    except ValueError:
        return
    train(model, optimizer, range(1))
    outcore.synchronize(model)
    assert not torch.equal(model.model.layers[1].mlp.up_proj.weight, before)


def test_some_of_the_parameters_only() -> None:
    """Parameters that no group holds stay as they are; their neighbours in the block move."""
    plain, model = LLAMA.make(), offloaded(LLAMA.make())

    def chosen(net: Any) -> list[Tensor]:
        return [p for name, p in net.named_parameters() if "mlp" in name or "lm_head" in name]

    theirs = torch.optim.AdamW(chosen(plain), lr=LR)
    with pytest.warns(UserWarning, match=r"embed_tokens.* and 19 more .* not given to AdamW"):
        ours = outcore.AdamW(chosen(model), lr=LR)
    assert train(model, ours, range(3)) == pytest.approx(train(plain, theirs, range(3)), rel=1e-5)
    outcore.synchronize(model)
    for (name, parameter), reference in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert relative_difference(parameter, reference) <= 1e-5, name


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


# Several backwards, odd orders of calls


def test_several_backwards_add_up() -> None:
    halves = [batch_of(seed=0, sequences=3), batch_of(seed=1, sequences=4)]
    plain = LLAMA.make()
    for batch in halves:
        plain(**batch).loss.backward()
    reference: tuple[dict[str, Tensor], list[float], dict[str, Tensor]] | None = None
    for options in PLACEMENTS:
        model = offloaded(LLAMA.make(), **options)
        optimizer = outcore.AdamW(model, lr=LR, max_grad_norm=0.5)
        gradients, norms = {}, []
        for _ in range(2):
            for batch in halves:
                model(**batch).loss.backward()
            gradients = gradients or gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
        if reference is None:
            reference = gradients, norms, weights_of(model)
            for name, parameter in plain.named_parameters():
                assert relative_difference(gradients[name], parameter.grad) <= 1e-5, name
            continue
        assert norms == reference[1]
        assert_equal(gradients, reference[0])
        assert_equal(weights_of(model), reference[2])


def test_zero_grad_of_model_and_optimizer() -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR)
    for clear in (model.zero_grad, optimizer.zero_grad, lambda: optimizer.zero_grad(False)):
        model(**batch_of(seed=1)).loss.backward()
        assert gradients_of(model)
        clear()
        assert gradients_of(model) == {}
        model(**batch_of(seed=2)).loss.backward()
        ours = gradients_of(model)
        clear()
        plain = LLAMA.make()
        plain(**batch_of(seed=2)).loss.backward()
        for name, parameter in plain.named_parameters():
            assert relative_difference(ours[name], parameter.grad) <= 1e-5, name


def _clear_around(model: Any) -> None:
    torch.nn.ModuleList([model]).zero_grad()


def _clear_inside(model: Any) -> None:
    model.model.zero_grad()
    model.lm_head.zero_grad()


def _clear_attributes(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("clear", [_clear_around, _clear_inside, _clear_attributes])
def test_gradients_that_are_not_reached_by_who_clears_them_are_told(clear: Any) -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(3):
            clear(model)
            model(**batch_of(seed=seed)).loss.backward()
            optimizer.step()
    assert ["step() has used already" in str(w.message) for w in told] == [True]


def test_gradients_that_add_up_before_a_step_are_not_told() -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for clear in (optimizer.zero_grad, model.zero_grad):
            for seed in range(2):
                model(**batch_of(seed=seed)).loss.backward()
            optimizer.step()
            optimizer.step()
            clear()


def test_step_twice_applies_the_gradient_twice() -> None:
    plain, model = LLAMA.make(), offloaded(LLAMA.make())
    theirs, ours = torch.optim.AdamW(plain.parameters(), lr=LR), outcore.AdamW(model, lr=LR)
    for net, optimizer in ((plain, theirs), (model, ours)):
        net(**batch_of()).loss.backward()
        optimizer.step()
        optimizer.step()
    outcore.synchronize(model)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_difference(a, b) <= 1e-5, name


@pytest.mark.parametrize("during", [False, True])
def test_step_without_backward_changes_nothing(during: bool) -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR, update_during_backward=during)
    optimizer.step()
    optimizer.step()
    assert_equal(weights_of(model), LLAMA.make().state_dict())
    train(model, optimizer, range(1))
    before = weights_of(model)
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(weights_of(model), before)
    assert {int(e["step"]) for e in optimizer.state_dict()["state"].values()} == {1}


def test_closure() -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch_of()).loss
        loss.backward()
        return loss

    first, second = float(optimizer.step(closure).detach()), float(optimizer.step(closure).detach())
    assert second < first


def test_a_gradient_from_before_the_optimizer_is_not_used() -> None:
    batch = batch_of()
    model = offloaded(LLAMA.make())
    with pytest.raises(outcore.OutcoreError, match="AdamW"):
        model(**batch).loss.backward()
    optimizer = outcore.AdamW(model, lr=LR)
    optimizer.zero_grad()
    model(**batch).loss.backward()
    plain = LLAMA.make()
    plain(**batch).loss.backward()
    found = gradients_of(model)
    for name, parameter in plain.named_parameters():
        assert relative_difference(found[name], parameter.grad) <= 1e-5, name


# Non-finite gradients


def _poison(model: Any, block: int) -> Any:
    """Make one element of a block's gradient infinite, without touching its weights."""
    handle = model.model.layers[block].mlp.act_fn.register_full_backward_hook(
        lambda module, grad_input, grad_output: (grad_input[0] * float("inf"),)
    )
    return handle


@pytest.mark.parametrize("options", PLACEMENTS)
@pytest.mark.parametrize("on_non_finite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite(on_non_finite: str, options: dict[str, Any]) -> None:
    model = offloaded(LLAMA.make(), **options)
    optimizer = outcore.AdamW(model, lr=LR, max_grad_norm=1.0, on_non_finite=on_non_finite)
    train(model, optimizer, range(2))
    weights, state = weights_of(model), copied(optimizer.state_dict())
    optimizer.zero_grad()
    handle = _poison(model, 1)
    model(**batch_of(seed=5)).loss.backward()
    handle.remove()
    if on_non_finite == "raise":
        with pytest.raises(outcore.NonFiniteGradient, match=r"model\.layers\.1\b") as caught:
            optimizer.step()
        assert "layers.2" not in str(caught.value), "the last block's gradient was finite"
    else:
        optimizer.step()
        assert optimizer.num_skipped_steps == 1
    assert_equal(weights_of(model), weights)
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, state["state"][index][key]), (index, key)
    # And it goes on as if the batch had never been.
    losses = train(model, optimizer, range(2, 4))
    model = offloaded(LLAMA.make(), **options)
    optimizer = outcore.AdamW(model, lr=LR, max_grad_norm=1.0)
    train(model, optimizer, range(2))
    assert train(model, optimizer, range(2, 4)) == losses


def test_a_loss_that_is_not_finite() -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR)
    (model(**batch_of()).loss * float("nan")).backward()
    with pytest.raises(outcore.NonFiniteGradient, match="lm_head"):
        optimizer.step()
    assert_equal(weights_of(model), LLAMA.make().state_dict())


# Updates during the backward


def test_a_second_backward_is_refused() -> None:
    model = offloaded(LLAMA.make())
    outcore.AdamW(model, lr=LR, update_during_backward=True)
    model(**batch_of()).loss.backward()
    with pytest.raises(RuntimeError, match="update_during_backward"):
        model(**batch_of()).loss.backward()


def test_the_norm_is_reported_during_the_backward_too() -> None:
    norms = []
    for during in (False, True):
        model = offloaded(LLAMA.make())
        optimizer = outcore.AdamW(model, lr=LR, update_during_backward=during)
        train(model, optimizer, range(2))
        norms.append(optimizer.grad_norm)
    assert norms[0] == norms[1]


def test_a_gradient_that_is_not_finite_during_the_backward() -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, lr=LR, update_during_backward=True)
    handle = _poison(model, 1)
    model(**batch_of()).loss.backward()
    handle.remove()
    with pytest.raises(outcore.NonFiniteGradient, match=r"layers\.1\b.*checkpoint"):
        optimizer.step()


# Bad arguments


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
