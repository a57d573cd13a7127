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


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_backward_adds_to_what_is_in_grad_of_an_edge(name: str) -> None:
    plain, (model, _) = LLAMA.make(), with_optimizer(offloaded(LLAMA.make()))
    for each in (plain, model):
        parameter = each.get_parameter(name)
        parameter.grad = torch.full_like(parameter, 0.01)
        each(**batch_of()).loss.backward()
    assert model.get_parameter(name).grad is None
    expected = plain.get_parameter(name).grad
    assert relative_difference(gradients_of(model)[name], expected) <= 1e-5


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
