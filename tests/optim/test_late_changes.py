"""Parameters frozen, unfrozen or hooked after the optimizer was made: obeyed or refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everything import differing, everything
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"num_visits": 0},
    "visiting": {"num_visits": 3},
    "device": {"weights": "device", "state": "device"},
    "disk": {"weights": "disk", "state": "disk"},
}
FROZEN = ["model.layers.1.", "model.layers.2.mlp.up_proj", "norm", "embed_tokens", "lm_head"]


def plain_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).train()


def offloaded(model: Any, tmp_path: Path, placement: str = "host", **more: Any) -> Any:
    options = {**PLACEMENTS[placement], **more}
    if "disk" in options.values():
        options["disk"] = f"{tmp_path}:1GiB"
    return outcore.offload(model, device="cpu", **options)


def set_trainable(model: Any, names: list[str], is_trainable: bool) -> None:
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(is_trainable)


def train(model: Any, optimizer: Any, steps: range, clip: float | None = None) -> None:
    """``clip``: of a plain model; outcore.AdamW does it itself."""
    for step in steps:
        ids = torch.randint(0, 61, (4, 8), generator=torch.Generator().manual_seed(step))

        def forward_and_backward(ids: Tensor = ids) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss.detach()

        optimizer.step(forward_and_backward)
        optimizer.zero_grad()


def assert_like(model: Any, plain: Any) -> None:
    expected = plain.state_dict()
    for name, ours in model.state_dict().items():
        assert float((ours - expected[name]).norm() / expected[name].norm()) <= 1e-5, name


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("during", [False, True])
def test_freezing_and_thawing_are_as_in_torch(tmp_path: Path, placement: str, during: bool) -> None:
    """With clipping: the gradient of what is frozen is no part of the norm."""
    plain = plain_model()
    theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    model = offloaded(plain_model(), tmp_path, placement)
    optimizer = outcore.AdamW(model, max_grad_norm=0.3, update_during_backward=during, **OPTIONS)
    for is_trainable, steps in ((True, range(3)), (False, range(3, 6)), (True, range(6, 9))):
        for each in (plain, model):
            set_trainable(each, FROZEN, is_trainable)
        before = copy.deepcopy(model.state_dict())
        train(plain, theirs, steps, clip=0.3)
        train(model, optimizer, steps)
        if not is_trainable:
            moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
            assert moved == {n for n in before if not any(part in n for part in FROZEN)}
    assert_like(model, plain)
    ours, other = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    assert {k: int(e["step"]) for k, e in ours.items()} == {
        k: int(e["step"]) for k, e in other.items()
    }
    assert {int(entry["step"]) for entry in ours.values()} == {6, 9}


def test_a_gradient_from_before_the_freezing_counts(tmp_path: Path) -> None:
    plain = plain_model()
    theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    model = offloaded(plain_model(), tmp_path)
    optimizer = outcore.AdamW(model, **OPTIONS)
    ids = torch.arange(16).view(2, 8)
    for each, its in ((plain, theirs), (model, optimizer)):
        each(input_ids=ids, labels=ids).loss.backward()
        set_trainable(each, FROZEN, False)
        each(input_ids=ids + 20, labels=ids + 20).loss.backward()
        its.step()
    assert_like(model, plain)


def test_a_checkpoint_of_frozen_parameters_resumes_to_the_bit(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    runs = []
    for placement in ("host", "device"):
        model = offloaded(plain_model(), tmp_path, placement)
        optimizer = outcore.AdamW(model, **OPTIONS)
        if not runs:
            train(model, optimizer, range(2))
            set_trainable(model, FROZEN, False)
            train(model, optimizer, range(2, 5))
            run_state.save(folder, model, optimizer, {})
        else:
            run_state.load(folder, model, optimizer)
        set_trainable(model, FROZEN, False)
        train(model, optimizer, range(5, 6))
        set_trainable(model, FROZEN, True)
        train(model, optimizer, range(6, 8))
        runs.append(everything(model, optimizer))
    assert differing(*runs) == []


@pytest.mark.parametrize("name", ["model.layers.1.", "model.norm", "embed_tokens"])
@pytest.mark.parametrize("during", [False, True])
def test_what_was_frozen_at_the_offload_cannot_be_trained_later(
    tmp_path: Path, name: str, during: bool
) -> None:
    plain = plain_model()
    set_trainable(plain, [name], False)
    model = offloaded(plain, tmp_path)
    optimizer = outcore.AdamW(model, update_during_backward=during, **OPTIONS)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    set_trainable(model, [name], True)
    with pytest.raises(outcore.OutcoreError, match=rf"{name}.*frozen when.*offload anew"):
        train(model, optimizer, range(2, 3))
    assert differing(before, everything(model, optimizer)) == []
    set_trainable(model, [name], False)
    optimizer.zero_grad()
    train(model, optimizer, range(2, 3))  # set back, it goes on
    assert optimizer.num_steps == 3


Register = Callable[[Tensor], Any]
HOOKS: dict[str, Register] = {
    "on the gradient": lambda p: p.register_hook(lambda gradient: gradient * 2),
    "on .grad": lambda p: p.register_post_accumulate_grad_hook(lambda parameter: None),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["model.layers.1.mlp.up_proj.weight", "model.norm.weight"], HOOKS),
        *itertools.product(["lm_head.weight", "model.embed_tokens.weight"], ["on .grad"]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"update_during_backward": True}], ids=str)
def test_a_hook_that_would_not_run_is_refused(
    tmp_path: Path, name: str, kind: str, options: dict[str, Any]
) -> None:
    model = offloaded(plain_model(), tmp_path)
    optimizer = outcore.AdamW(model, **OPTIONS, **options)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    handle = HOOKS[kind](model.get_parameter(name))
    with pytest.raises(outcore.OutcoreError, match=rf"{name} has a hook.*handle\.remove"):
        train(model, optimizer, range(1, 2))
    assert differing(before, everything(model, optimizer)) == []
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, range(1, 2))
    assert optimizer.num_steps == 2


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("during", [False, True])
def test_a_loss_of_a_blocks_own_parameters_is_refused(
    tmp_path: Path, placement: str, max_grad_norm: float | None, during: bool
) -> None:
    """PEFT's AdaLoRA makes one: its gradient would go to .grad, which nobody reads."""
    model = offloaded(plain_model(), tmp_path, placement)
    optimizer = outcore.AdamW(
        model, max_grad_norm=max_grad_norm, update_during_backward=during, **OPTIONS
    )
    ids = torch.arange(8)[None]

    def forward_and_backward() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss = loss + model.model.layers[1].mlp.up_proj.weight.square().sum()
        loss.backward()
        return loss.detach()

    refused = r"layers\.1\.mlp\.up_proj\.weight was also used outside of its block"
    with pytest.raises(outcore.OutcoreError, match=refused):
        optimizer.step(forward_and_backward)
    optimizer.zero_grad()
    train(model, optimizer, range(2))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_hooks_on_edges_run(tmp_path: Path, name: str) -> None:
    plain = plain_model()
    options = {**OPTIONS, "eps": 1e-6}  # a gradient near 1e-8 is rounding noise
    theirs = torch.optim.AdamW(plain.parameters(), **options)
    model = offloaded(plain_model(), tmp_path)
    optimizer = outcore.AdamW(model, **options)
    for each, its in ((plain, theirs), (model, optimizer)):
        train(each, its, range(1))
        each.get_parameter(name).register_hook(lambda gradient: gradient * 0.1)
        train(each, its, range(1, 4))
    assert_like(model, plain)


def test_an_interrupted_step_says_that_it_is_half_done(tmp_path: Path) -> None:
    model = offloaded(plain_model(), tmp_path)
    optimizer = outcore.AdamW(model, update_during_backward=True, **OPTIONS)
    train(model, optimizer, range(1))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_full_backward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1, 2))
    handle.remove()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"half done.*checkpoint.*step\(\)"):
        train(model, optimizer, range(1, 2))
    optimizer.step()  # ends it
    train(model, optimizer, range(2, 3))
    counts = optimizer.step_counts()
    assert optimizer.num_steps == 3
    assert counts["lm_head.weight"] == 3
    assert counts["model.layers.0.mlp.up_proj.weight"] == 2  # the interrupt came before it
