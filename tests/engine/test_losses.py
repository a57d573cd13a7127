"""Losses and logits of an offloaded model: those of the plain one, and never whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import (
    BY_NAME,
    VOCAB,
    batch_of,
    offloaded,
)
from torch import Tensor
from torch.nn import functional as F
from training import LLAMA, assert_same_gradients, with_optimizer

from outcore.passes.chunked_loss import LossJob, chunked_loss_sum


def test_custom_loss_on_logits() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return (logits.log_softmax(-1)[..., 5] ** 2).mean() + logits[:, 3].tanh().sum()

    assert_same_gradients(loss_of)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_outside_the_model(reduction: str, label_smoothing: float) -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCAB),
            batch["labels"][:, 1:].reshape(-1),
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return loss.square().sum() if reduction == "none" else loss

    assert_same_gradients(loss_of)


def test_cross_entropy_with_classes_in_the_middle() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"])

    assert_same_gradients(loss_of)


def test_number_of_items_in_the_batch() -> None:
    batch = batch_of()
    assert_same_gradients(lambda model: model(**batch, num_items_in_batch=17).loss)


def test_loss_times_a_factor() -> None:
    batch = batch_of()
    assert_same_gradients(lambda model: model(**batch).loss * 3.5 + 1)


def test_a_factor_that_bf16_cannot_hold() -> None:
    """1 / 240 is 0.3% more in bf16: no gradient may be scaled by that."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(240, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, 64, generator=generator).bfloat16().requires_grad_()
    job = LossJob(
        hidden=hidden,
        weight=weight,
        bias=None,
        steps=((Tensor.to, (torch.float32,), {}),),
        target=torch.randint(0, VOCAB, (240,), generator=generator),
        ignore_index=-100,
        smoothing=0.0,
        is_compiled=False,
        wants_gradient=True,
    )
    # Without oneDNN: its AMX kernels are illegal instructions in some sandboxes.
    with torch.backends.mkldnn.flags(enabled=False):
        whole = torch.autograd.grad(chunked_loss_sum(job), (hidden, weight))
        mean = torch.autograd.grad(chunked_loss_sum(job) / 240, (hidden, weight))
    for total, found in zip(whole, mean, strict=True):
        ratio = float(found.double().norm() / total.double().norm()) * 240
        assert ratio == pytest.approx(1, abs=5e-4)


def test_loss_and_a_penalty_on_its_logits() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(**batch)
        return output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()

    assert_same_gradients(loss_of)


def test_custom_loss_on_hidden_states() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(**batch, output_hidden_states=True)
        assert len(output.hidden_states) == 4
        return output.loss + sum(h.square().mean() for h in output.hidden_states)

    assert_same_gradients(loss_of)


def test_custom_loss_through_the_inner_model() -> None:
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
        return model.lm_head(hidden).square().mean()

    assert_same_gradients(loss_of)


def test_a_loss_that_is_an_autograd_function_of_its_own() -> None:
    batch = batch_of()

    class SquareSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return (x * x).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * grad * ctx.saved_tensors[0]

    assert_same_gradients(lambda model: SquareSum.apply(model(input_ids=batch["input_ids"]).logits))


def test_logits_that_were_first_read_without_gradients() -> None:
    """An accuracy is often computed under no_grad before the loss."""
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        with torch.no_grad():
            (logits.argmax(-1) == batch["labels"]).float().mean()
        return F.cross_entropy(logits.view(-1, VOCAB), batch["labels"].view(-1))

    assert_same_gradients(loss_of)


def test_mixed_losses_of_logits_read_without_gradients() -> None:
    """As before, but with a second term that has gradients and so hides the missing ones."""
    batch = batch_of()

    def loss_of(model: Any) -> Tensor:
        output = model(input_ids=batch["input_ids"], output_hidden_states=True)
        with torch.no_grad():
            output.logits.argmax(-1)
        return output.logits.square().mean() + output.hidden_states[1].square().mean()

    assert_same_gradients(loss_of)


def test_logits_are_usable_like_a_tensor() -> None:
    batch = batch_of()
    expected = LLAMA.make()(**batch).logits.detach()
    model = offloaded(LLAMA.make())
    logits, hidden_size = model(**batch).logits, model.config.hidden_size
    assert isinstance(logits, Tensor)
    assert logits.shape == expected.shape
    assert logits.size(-1) == VOCAB
    assert logits.dtype == torch.float32
    assert logits.requires_grad
    assert len(logits) == len(expected)
    for function in (
        lambda x: x.argmax(-1),
        lambda x: x.detach().numpy(),
        lambda x: x[0, 1].tolist(),
        lambda x: torch.stack([x, x])[1, 2],
        lambda x: torch.cat((x, x)).float().cpu(),
        lambda x: x.softmax(-1).topk(3).indices,
        lambda x: next(iter(x)),
        lambda x: x.clone().mul_(2),
        lambda x: x.to(torch.float64).sum(),
        lambda x: (x / 2).tanh() * 2,
        lambda x: x[..., 0],
        lambda x: x[:, -1:, :].contiguous(),
        lambda x: x.reshape(-1),
        lambda x: x.view(-1, VOCAB)[3],
        lambda x: x[:, :, :hidden_size, ...],
        lambda x: x[:, 2:, :, ...],
        lambda x: x[..., 2:, 3:5],
        lambda x: x.view(torch.float32),
        lambda x: x.gather(-1, batch["input_ids"].unsqueeze(-1)),
    ):
        # Made anew each time: what was read once is an ordinary tensor from then on.
        ours, theirs = function(model(**batch).logits), function(expected)
        torch.testing.assert_close(
            torch.as_tensor(ours).detach(), torch.as_tensor(theirs), rtol=1e-5, atol=1e-5
        )


def _write_whole(logits: Tensor) -> Tensor:
    flat = logits.view(-1, logits.shape[-1])
    logits[..., 5] = -5.0
    return flat


def _write_a_view(logits: Tensor) -> Tensor:
    shifted = logits[:, :-1, :]
    shifted.mul_(0.5)
    return logits.reshape(-1, logits.shape[-1])


def _write_a_view_of_a_view(logits: Tensor) -> Tensor:
    inner = logits[:, 1:, :][:, :-1]
    inner += 1.0 * torch.arange(logits.shape[-1])
    return logits[:, :, :].reshape(-1, logits.shape[-1])


@pytest.mark.parametrize("write", [_write_whole, _write_a_view, _write_a_view_of_a_view])
def test_writes_to_logits_reach_their_views(write: Callable[[Tensor], Tensor]) -> None:
    def loss_of(model: Any) -> Tensor:
        batch = batch_of()
        logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(write(logits), batch["input_ids"].flatten())

    assert_same_gradients(loss_of)


def test_logits_after_the_loss_and_its_backward() -> None:
    batch = batch_of()
    expected = LLAMA.make()(**batch).logits.detach()
    model, _ = with_optimizer(offloaded(LLAMA.make()))
    output = model(**batch)
    output.loss.backward()
    torch.testing.assert_close(output.logits.detach(), expected, rtol=1e-5, atol=1e-5)


def test_logits_after_the_step_are_not_those_of_the_new_weights() -> None:
    """Either the logits of the forward, or an error: never other values."""
    batch = batch_of()
    expected = LLAMA.make()(**batch).logits.detach()
    model, optimizer = with_optimizer(offloaded(LLAMA.make()))
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    optimizer.synchronize()
    try:
        logits = output.logits.detach()
    except RuntimeError:
        return
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_all_labels_masked() -> None:
    batch = batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    theirs = LLAMA.make()(**batch).loss
    ours = offloaded(LLAMA.make())(**batch).loss
    assert torch.equal(ours.detach().isnan(), theirs.detach().isnan())


def test_mean_of_chunks_is_the_mean_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a chunk holds: chunks of 64 rows out of 5 x 40."""
    monkeypatch.setattr("outcore.planning.loss_chunks.MOST_LOGITS", 64 * VOCAB)
    batch = batch_of(seq_len=40)
    assert_same_gradients(lambda model: model(**batch).loss)
    assert_same_gradients(lambda model: model(**batch).loss, BY_NAME["gemma2"])
    assert_same_gradients(lambda model: model(**batch).loss, BY_NAME["bert"])


def test_the_logits_of_a_whole_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == VOCAB:
            rows.append(x.shape[:-1].numel())
        return linear(x, weight, bias)

    monkeypatch.setattr("outcore.planning.loss_chunks.MOST_LOGITS", 64 * VOCAB)
    monkeypatch.setattr(F, "linear", watched)
    for family in (LLAMA, BY_NAME["gemma2"], BY_NAME["granite"], BY_NAME["cohere"]):
        rows.clear()
        model, _ = with_optimizer(offloaded(family.make()))
        model(**batch_of(seq_len=40)).loss.backward()
        assert rows, family.name
        assert max(rows) <= 64, family.name
