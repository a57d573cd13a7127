"""Head and cross-entropy in chunks, each differentiated at once.

The logits of a whole batch never exist. Of a summed loss nothing is computed twice: the gradients
of a chunk are taken while its logits are there. Losses token by token, whose gradients are known
only later, make the logits of a chunk again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outcore.passes.compilation import compiled
from outcore.passes.first_order import first_order_only
from outcore.planning.loss_chunks import chunk_rows
from outcore.stream.recording import compute_stream, recorded

Steps = tuple[tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]], ...]
"""Element-wise functions between head and loss, with their further arguments."""


def apply_steps(steps: Steps, logits: Tensor) -> Tensor:
    for function, args, kwargs in steps:
        logits = function(logits, *args, **kwargs)
    return logits


@dataclass(frozen=True, kw_only=True, eq=False)
class LossJob:
    """What to compute the loss of. hidden (rows, hidden), weight (vocabulary, hidden)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: Steps
    target: Tensor
    ignore_index: int
    smoothing: float
    is_compiled: bool
    wants_gradient: bool


def chunked_loss_sum(job: LossJob) -> Tensor:
    """Return the summed cross-entropy, differentiable in hidden, weight and bias."""
    bias = job.bias if job.bias is not None else job.hidden.new_empty(0)
    with recorded("compute", "head and loss", compute_stream(job.hidden.device)):
        total: Tensor = _ChunkedLoss.apply(job, job.hidden, job.weight, bias)  # type: ignore[no-untyped-call, unused-ignore]
    return total


def chunked_token_losses(job: LossJob) -> Tensor:
    """Return the cross-entropy of each row, zero where it is ignored; differentiable likewise."""
    bias = job.bias if job.bias is not None else job.hidden.new_empty(0)
    with recorded("compute", "head and loss", compute_stream(job.hidden.device)):
        losses: Tensor = _TokenLosses.apply(job, job.hidden, job.weight, bias)  # type: ignore[no-untyped-call, unused-ignore]
    return losses


def _loss_of_logits(
    steps: Steps, logits: Tensor, target: Tensor, ignore_index: int, smoothing: float
) -> Tensor:
    """The summed loss of one chunk. logits (rows, vocabulary), target (rows,)."""
    return F.cross_entropy(
        apply_steps(steps, logits),
        target,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=smoothing,
    )


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` in fp32, without a product in between where the device can."""
    right = right.to(left.dtype)
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


class _HeadGradients:
    """Gradients of the head's input, weight and bias, made chunk by chunk; None: not needed.

    The products are written out: autograd would make a bf16 gradient of the whole head for each
    chunk, only to add it to the sum.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor, needs: Sequence[bool]) -> None:
        self._weight = weight
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight_sum, self.bias_sum = (
            torch.zeros(t.shape, dtype=torch.float32, device=t.device) if need else None
            for t, need in zip((weight, bias), needs[1:], strict=True)
        )

    def add(self, cut: slice, part: Tensor, logits_grad: Tensor) -> None:
        """Take the logits' gradient of the rows ``cut``, whose input is ``part``."""
        if self.hidden is not None:
            self.hidden[cut] = logits_grad @ self._weight
        if self.weight_sum is not None:
            _add_product_(self.weight_sum, logits_grad.t(), part)
        if self.bias_sum is not None:
            self.bias_sum += logits_grad.sum(0, dtype=torch.float32)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the cross-entropies; computes the gradients with the value, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, job: LossJob, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        has_bias = job.bias is not None
        needs = [t.requires_grad and job.wants_gradient for t in (hidden, weight, bias)]
        function = _compiled_loss() if job.is_compiled else _loss_of_logits
        rows = chunk_rows(hidden.shape[0], *weight.shape)
        gradients = _HeadGradients(hidden, weight, bias, needs)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            cut = slice(start, start + rows)
            part = hidden[cut]
            logits = F.linear(part, weight, bias if has_bias else None).requires_grad_(any(needs))
            with torch.enable_grad():
                value = function(
                    job.steps, logits, job.target[cut], job.ignore_index, job.smoothing
                )
            total += value.detach()
            if not any(needs):
                continue
            (logits_grad,) = torch.autograd.grad(value, logits)
            del value, logits
            gradients.add(cut, part, logits_grad)
            del logits_grad
        ctx.save_for_backward(gradients.hidden, gradients.weight_sum, gradients.bias_sum)
        ctx.dtypes = hidden.dtype, weight.dtype, bias.dtype
        return total

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            *(
                None if total is None else _scaled(total, grad, dtype)
                for total, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ),
        )


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in ``dtype``, for which ``factor`` (fp32) is not rounded.

    In bf16 1 / 240 is 0.3% too large, and so would be every gradient below the head.
    """
    # Without axes it would be cast to the type of ``total``.
    axes = (1,) * total.dim()
    return torch.mul(total, factor.view(axes), out=total.new_empty(0, dtype=dtype))


class _TokenLosses(torch.autograd.Function):
    """The cross-entropies one by one; a chunk's logits are made in the forward and the backward."""

    @staticmethod
    def forward(ctx: Any, job: LossJob, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias)
        losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        rows = chunk_rows(hidden.shape[0], *weight.shape)
        for start in range(0, hidden.shape[0], rows):
            cut = slice(start, start + rows)
            logits = F.linear(hidden[cut], weight, bias if job.bias is not None else None)
            losses[cut] = _losses_of_logits(job, logits, job.target[cut])
        return losses

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        job, (_, *needs) = ctx.job, ctx.needs_input_grad
        needs[2] = needs[2] and job.bias is not None
        gradients = _HeadGradients(hidden, weight, bias, needs)
        rows = chunk_rows(hidden.shape[0], *weight.shape)
        for start in range(0, hidden.shape[0], rows):
            cut = slice(start, start + rows)
            part = hidden[cut]
            logits = F.linear(part, weight, bias if job.bias is not None else None)
            logits.requires_grad_()
            with torch.enable_grad():
                losses = _losses_of_logits(job, logits, job.target[cut])
            (logits_grad,) = torch.autograd.grad(losses, logits, grad[cut])
            del losses, logits
            gradients.add(cut, part, logits_grad)
            del logits_grad
        sums = ((gradients.weight_sum, weight), (gradients.bias_sum, bias))
        return (
            None,
            gradients.hidden,
            *(None if total is None else total.to(like.dtype) for total, like in sums),
        )


def _losses_of_logits(job: LossJob, logits: Tensor, target: Tensor) -> Tensor:
    """The loss of each row of a chunk. logits (rows, vocabulary), target (rows,)."""
    return F.cross_entropy(
        apply_steps(job.steps, logits),
        target,
        ignore_index=job.ignore_index,
        reduction="none",
        label_smoothing=job.smoothing,
    ).float()


_compiled: Callable[..., Tensor] | None = None


def _compiled_loss() -> Callable[..., Tensor]:
    global _compiled
    if _compiled is None:
        _compiled = compiled(_loss_of_logits)
    return _compiled
