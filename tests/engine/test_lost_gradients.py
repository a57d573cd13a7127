"""What would lose a gradient is refused, with the block and the remedy, not trained wrongly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import batch_of, offloaded
from torch import Tensor, nn
from training import LLAMA, assert_same_gradients, with_optimizer

import outcore
from outcore.errors import OutcoreError, UnsupportedModel

IDS = torch.arange(12).view(4, 3)


@dataclass(slots=True)
class _Box:
    """Not registered with pytree: a leaf that nobody looks into."""

    hidden: Tensor | None = None


class _Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, box: _Box | None = None) -> Any:
        return _Box(x + self.inner(x))


class _Writes(_Returns):
    def forward(self, x: Tensor, box: _Box | None = None) -> Any:
        assert box is not None
        box.hidden = self.inner(x)
        return x + box.hidden


class _Remembers(_Returns):
    def forward(self, x: Tensor, box: _Box | None = None) -> Any:
        self.last = self.inner(x)
        return x + self.last


class _Overwrites(_Returns):
    def forward(self, x: Tensor, box: _Box | None = None) -> Any:
        x += self.inner(x).tanh()
        return x


class _Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            box = _Box()
            y = layer(x, box=box)
            x = y.hidden if isinstance(y, _Box) else y if box.hidden is None else y + box.hidden
        return x.pow(2).mean()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (_Returns, r"layers\.0 \(_Returns\) returns a _Box that holds tensors with gradients"),
        (_Overwrites, r"layers\.0 \(_Overwrites\) changes one of its inputs .* in place.*clone"),
        (_Writes, r"layers\.0 \(_Writes\) takes as argument box a _Box"),
    ],
)
def test_what_has_no_gradient_is_refused(block: Any, message: str) -> None:
    plain, model = _Net(block), offloaded(_Net(block))
    outcore.AdamW(model)
    with pytest.raises(UnsupportedModel, match=message):
        model(IDS)
    with torch.no_grad():  # nothing to lose; and the refused call left no block in use
        assert torch.allclose(model(IDS), plain(IDS))


def test_a_tensor_that_a_block_keeps_as_attribute_is_named() -> None:
    model = offloaded(_Net(_Remembers))
    with pytest.warns(UserWarning, match=r"layers\.0 \(_Remembers\) keeps .* as last: .*return it"):
        model(IDS)


def test_second_order_gradients_are_refused() -> None:
    model, _ = with_optimizer(offloaded(LLAMA.make()))
    batch = batch_of()
    ids = batch.pop("input_ids")
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    losses: list[Callable[[], Tensor]] = [
        lambda: model(inputs_embeds=embedded, **batch).loss,
        lambda: model.model(inputs_embeds=embedded).last_hidden_state.pow(2).mean(),
    ]
    for loss in losses:
        with pytest.raises(OutcoreError, match="create_graph=True"):
            torch.autograd.grad(loss(), embedded, create_graph=True)
        (grad,) = torch.autograd.grad(loss(), embedded)
        assert grad.any()


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_loss_of_what_a_hook_kept_inside_a_block_is_refused(
    activations: str, is_alone: bool
) -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make(), activations=activations))
    kept: list[Tensor] = []
    mlp = model.model.layers[1].mlp
    hook = mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    for _ in range(2):  # the first also measures
        loss = model(**batch_of()).loss
        penalty = kept[-1].pow(2).mean()
        with pytest.raises(
            OutcoreError, match=r"from inside model\.layers\.1 .*on the block itself"
        ):
            (penalty if is_alone else loss + penalty).backward()
        optimizer.zero_grad()
    hook.remove()
    model(**batch_of()).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_a_loss_of_what_a_hook_on_a_block_kept_counts(activations: str) -> None:
    def loss_of(model: Any) -> Tensor:
        kept: list[Any] = []
        layer = model.model.layers[1]
        hook = layer.register_forward_hook(lambda module, args, output: kept.append(output))
        loss = model(**batch_of()).loss
        hook.remove()
        output = kept[0] if isinstance(kept[0], Tensor) else kept[0][0]
        return loss + output.pow(2).mean()

    assert_same_gradients(loss_of, activations=activations)


@pytest.mark.parametrize("during", [False, True])
def test_a_backward_that_names_its_inputs_leaves_blocks_out_and_is_told(during: bool) -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()), update_during_backward=during)
    model(**batch_of()).loss.backward(inputs=list(model.parameters()))
    with pytest.warns(UserWarning, match=r"leaves out model\.norm and 3 more.*without inputs"):
        optimizer.step()


def test_gradients_of_inputs_beside_a_backward_are_not_told() -> None:
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    batch = batch_of()
    ids = batch.pop("input_ids")
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for is_first in (True, False):
            if is_first:
                torch.autograd.grad(model(inputs_embeds=embedded, **batch).loss, embedded)
            model(input_ids=ids, **batch).loss.backward()
            if not is_first:
                torch.autograd.grad(model(inputs_embeds=embedded, **batch).loss, embedded)
            optimizer.step()
            optimizer.zero_grad()
