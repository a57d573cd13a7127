"""A backward whose weights are no longer those of its forward is refused, as autograd does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import batch_of, offloaded
from torch import Tensor
from training import LLAMA, PLACEMENTS, with_optimizer

import outcore

CHANGED = r"model\.norm .* were changed after this forward.*backward\(\) before step\(\)"


def _loss(model: Any, seed: int = 0) -> Tensor:
    loss: Tensor = model(**batch_of(seed=seed)).loss
    return loss


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("options", PLACEMENTS)
def test_a_step_between_forward_and_backward(options: dict[str, Any], activations: str) -> None:
    model, optimizer = with_optimizer(
        offloaded(LLAMA.make(), **{**options, "activations": activations})
    )
    first, second = _loss(model, 0), _loss(model, 1)
    first.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    for loss in (first, second):
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()
    optimizer.zero_grad()
    _loss(model, 2).backward()  # and nothing is left of the refused ones
    optimizer.step()


def _write(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def _load(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


@pytest.mark.parametrize("change", [_write, _load])
@pytest.mark.parametrize("weights", ["host", "device"])
def test_a_write_between_forward_and_backward(change: Callable[[Any], None], weights: str) -> None:
    plain = LLAMA.make()
    model, _ = with_optimizer(offloaded(LLAMA.make(), weights=weights))
    for each, message in ((plain, "modified by an inplace operation"), (model, CHANGED)):
        loss = _loss(each)
        change(each)
        with pytest.raises(RuntimeError, match=message):
            loss.backward()


def test_updates_during_the_backward() -> None:
    model = offloaded(LLAMA.make())
    optimizer = outcore.AdamW(model, update_during_backward=True)
    first, second = _loss(model, 0), _loss(model, 1)
    first.backward()
    with pytest.raises(RuntimeError, match="got a second gradient before step"):
        second.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=CHANGED):
        second.backward()
