"""A changed order of blocks is still right, only slower: the learned order is only a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import (
    BETAS,
    BY_NAME,
    LR,
    batch_of,
    gradients_of,
    groups_of,
    offloaded,
    relative_difference,
)
from torch import Tensor, nn

import outcore

LLAMA = BY_NAME["llama"]
PLACEMENTS = [
    {"num_slots": 1},
    {"num_slots": 2, "activations": "keep"},
    {"num_slots": 4, "num_visits": 2},
    {"weights": "device", "activations": "recompute"},
]


def _train(model: Any, optimizer: Any, steps: list[Callable[[Any], Tensor]]) -> list[float]:
    losses = []
    for loss_of in steps:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_like_plain(steps: list[Callable[[Any], Tensor]], make: Any = LLAMA.make) -> None:
    """Plain torch to rounding, and every placement to the bit."""
    plain = make()
    theirs = torch.optim.AdamW(groups_of(plain), lr=LR, betas=BETAS)
    expected = _train(plain, theirs, steps)
    runs = []
    for options in PLACEMENTS:
        model = offloaded(make(), **options)
        optimizer = outcore.AdamW(groups_of(model), lr=LR, betas=BETAS)
        losses = _train(model, optimizer, steps)
        assert losses == pytest.approx(expected, rel=1e-5)
        runs.append((losses, {n: t.clone() for n, t in model.state_dict().items()}))
    for name, parameter in plain.named_parameters():
        assert relative_difference(runs[0][1][name], parameter) <= 2e-5, name
    for losses, weights in runs[1:]:
        assert losses == runs[0][0]
        assert [n for n, t in weights.items() if not torch.equal(t, runs[0][1][n])] == []


def _plain_loss(seed: int) -> Callable[[Any], Tensor]:
    return lambda model: model(**batch_of(seed=seed)).loss


def test_two_forwards_before_a_backward() -> None:
    def loss_of(model: Any) -> Tensor:
        return model(**batch_of(seed=1)).loss + 2 * model(**batch_of(seed=2, seq_len=9)).loss

    assert_like_plain([_plain_loss(0), loss_of, loss_of, _plain_loss(3)])


def test_two_forwards_and_two_backwards_crosswise() -> None:
    def loss_of(model: Any) -> Tensor:
        first, second = model(**batch_of(seed=1)).loss, model(**batch_of(seed=2)).loss
        first.backward()
        return second

    assert_like_plain([loss_of, loss_of])


def test_skipped_layers() -> None:
    """Layers left out of one forward by changing the list, as layer drop does."""

    def without(layer: int) -> Callable[[Any], Tensor]:
        def loss_of(model: Any) -> Tensor:
            layers = model.model.layers
            model.model.layers = nn.ModuleList(
                [block for i, block in enumerate(layers) if i != layer]
            )
            try:
                return model(**batch_of(seed=layer), use_cache=False).loss
            finally:
                model.model.layers = layers

        return loss_of

    # A skipped layer has no gradient and takes no step; torch then counts its steps separately,
    # which changes later bias corrections: so each layer is skipped in the last step only.
    for layer in range(3):
        assert_like_plain([_plain_loss(5), _plain_loss(6), without(layer)])


def test_blocks_in_reverse() -> None:
    def backwards(model: Any) -> Tensor:
        layers = model.model.layers
        model.model.layers = nn.ModuleList(list(layers)[::-1])
        try:
            return model(**batch_of(seed=4)).loss
        finally:
            model.model.layers = layers

    assert_like_plain([_plain_loss(0), backwards, _plain_loss(1), backwards])


def test_early_exit() -> None:
    """A loss on a middle layer: later blocks run forward, but have no gradient and no step."""

    def loss_of(model: Any) -> Tensor:
        hidden = model(**batch_of(seed=1), output_hidden_states=True).hidden_states
        return model.lm_head(hidden[2]).square().mean()

    assert_like_plain([_plain_loss(0), loss_of])


def test_a_block_used_twice() -> None:
    def make() -> Any:
        model = LLAMA.make()
        model.model.layers[2] = model.model.layers[0]
        return model

    def loss_of(model: Any) -> Tensor:
        return model(**batch_of(seed=1), use_cache=False).loss

    assert_like_plain([loss_of, loss_of, loss_of], make)


def test_evaluation_between_forward_and_backward() -> None:
    def loss_of(model: Any) -> Tensor:
        loss = model(**batch_of(seed=1)).loss
        with torch.no_grad():
            model(**batch_of(seed=2))
        return loss

    assert_like_plain([loss_of, loss_of])


def test_second_backward_through_a_retained_graph() -> None:
    def loss_of(model: Any) -> Tensor:
        loss = model(**batch_of(seed=1)).loss
        loss.backward(retain_graph=True)
        return loss

    assert_like_plain([loss_of, loss_of])


def test_forward_that_is_never_differentiated() -> None:
    def loss_of(model: Any) -> Tensor:
        model(**batch_of(seed=2))
        return model(**batch_of(seed=1)).loss

    assert_like_plain([loss_of, loss_of, loss_of])


def test_batches_of_changing_shapes() -> None:
    shapes = [(5, 12), (1, 7), (4, 20), (5, 12), (2, 3)]
    assert_like_plain(
        [
            lambda model, n=n, length=length: model(**batch_of(sequences=n, seq_len=length)).loss
            for n, length in shapes
        ]
    )


def test_an_error_in_the_middle_of_a_forward() -> None:
    """After an error inside a block the model goes on as if nothing had been."""
    batch = batch_of()
    model = offloaded(LLAMA.make(), num_slots=1)
    optimizer = outcore.AdamW(model, lr=LR)
    block = model.model.layers[1]
    act = block.mlp.act_fn
    for _ in range(3):
        block.mlp.act_fn = _Failing()
        with pytest.raises(RuntimeError, match="on purpose"):
            model(**batch)
        block.mlp.act_fn = act
    model(**batch).loss.backward()
    block.mlp.act_fn = _Failing(after=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(**batch).loss.backward()
    block.mlp.act_fn = act
    optimizer.zero_grad()
    model(**batch).loss.backward()
    plain = LLAMA.make()
    plain(**batch).loss.backward()
    found = gradients_of(model)
    for name, parameter in plain.named_parameters():
        assert relative_difference(found[name], parameter.grad) <= 1e-5, name
    ledger = outcore.engine_of(model).device_ledger
    taken = ledger.taken_bytes
    model(**batch).loss.backward()
    assert ledger.taken_bytes == taken


class _Failing(nn.Module):
    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("on purpose")
        return nn.functional.silu(x)


def _several_backwards(model: Any, batch: dict[str, Any]) -> None:
    for _ in range(4):
        model(**batch).loss.backward()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_an_interrupt_while_waiting_for_weights(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C most often hits a wait: in a notebook the model must be usable afterwards."""
    from outcore.stream.lanes import Fence

    batch = batch_of()
    model = offloaded(LLAMA.make(), num_slots=num_slots)
    optimizer = outcore.AdamW(model, lr=LR)
    before_compute = Fence.before_compute
    for interrupted_wait in range(1, 12):
        waits = 0

        def wait(self: Fence, interrupted_wait: int = interrupted_wait) -> None:
            nonlocal waits
            waits += 1
            if waits == interrupted_wait:
                raise KeyboardInterrupt
            before_compute(self)

        monkeypatch.setattr(Fence, "before_compute", wait)
        with pytest.raises(KeyboardInterrupt):
            _several_backwards(model, batch)
        monkeypatch.setattr(Fence, "before_compute", before_compute)
        optimizer.zero_grad()
    model(**batch).loss.backward()
    plain = LLAMA.make()
    plain(**batch).loss.backward()
    found = gradients_of(model)
    for name, parameter in plain.named_parameters():
        assert relative_difference(found[name], parameter.grad) <= 1e-5, name


def test_the_order_is_learned() -> None:
    """From the second step on every fetch was asked for before it was needed."""
    model = offloaded(LLAMA.make(), num_slots=2)
    optimizer = outcore.AdamW(model, lr=LR)
    slots = outcore.engine_of(model).slots
    misses = []
    for step in range(4):
        model(**batch_of(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        misses.append(slots.num_misses)
    assert misses[1] == misses[3], misses


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_one_copy_of_the_weights_a_pass(micro_batch: int) -> None:
    model = offloaded(LLAMA.make(), num_slots=1, micro_batch=micro_batch)
    optimizer = outcore.AdamW(model, lr=LR)
    slots = outcore.engine_of(model).slots
    fetches = []
    for step in range(4):
        model(**batch_of(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        fetches.append(slots.num_fetches)
    # Three blocks forward and back; the last one is still there when the backward begins.
    assert fetches[3] - fetches[2] <= 6
