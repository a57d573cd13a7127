"""Logits that are made only when something other than cross-entropy wants them.

The model's own code between head and loss is left alone: in training the head returns
``DeferredLogits``, a tensor that remembers what it would be. Scaling, soft-capping and casts are
remembered too; cross-entropy then runs chunk by chunk (chunked_loss.py). Anything else that touches
the logits gets the real ones: more memory, never another value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outcore.passes.chunked_loss import (
    LossJob,
    Steps,
    apply_steps,
    chunked_loss_sum,
    chunked_token_losses,
)
from outcore.passes.first_order import first_order_only
from outcore.passes.token_ranges import check_labels

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Recipe:
    """How to make the logits: hidden states, the head's weight and bias, element-wise steps."""

    hidden: Tensor  # (..., hidden)
    weight: Tensor  # (vocabulary, hidden)
    bias: Tensor | None
    steps: Steps = ()
    dtype: torch.dtype = torch.float32
    is_compiled: bool = False
    is_current: Callable[[], bool] = lambda: True  # the head's weights are those of the forward

    def make(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.is_current():
            raise RuntimeError(
                "these logits were not read before optimizer.step() changed the head's weights: "
                "read them before the step, for example with output.logits.argmax(-1)"
            )
        return apply_steps(self.steps, F.linear(hidden, weight, bias))


class DeferredLogits(torch.Tensor):
    """Logits that are made only when something other than cross-entropy wants them."""

    _recipe: _Recipe
    _made: Tensor | None
    _views: list[tuple[weakref.ref[DeferredLogits], View]]  # of these logits, direct ones
    _whole: tuple[DeferredLogits, View] | None  # what they are a view of

    @staticmethod
    def of(recipe: _Recipe, leading: Sequence[int]) -> DeferredLogits:
        logits: DeferredLogits = _Deferral.apply(  # type: ignore[no-untyped-call, unused-ignore]
            recipe, tuple(leading), recipe.hidden, recipe.weight, recipe.bias
        )
        logits._recipe = recipe
        logits._made = None
        logits._views, logits._whole = [], None
        return logits

    def view_of(self, whole: DeferredLogits, view: View) -> DeferredLogits:
        """Note whose memory the real logits would share."""
        self._whole = whole, view
        whole._views.append((weakref.ref(self), view))
        return self

    def share_memory_with_views(self) -> None:
        """Before a write: make the real logits of all that would share memory, in one memory."""
        if self._whole is not None:
            self._whole[0].share_memory_with_views()
            return
        self._make_views()

    def _make_views(self) -> None:
        with torch.set_grad_enabled(self.requires_grad):
            for reference, view in self._views:
                logits = reference()
                if logits is not None:
                    logits._made = view(self.made())
                    logits._make_views()

    def made(self) -> Tensor:
        """Return the real logits, made once."""
        if self._made is None:
            recipe = self._recipe
            # Whoever reads them first, with or without gradients, others may want gradients.
            with torch.inference_mode(False), torch.set_grad_enabled(self.requires_grad):
                logits = recipe.make(recipe.hidden, recipe.weight, recipe.bias)
                self._made = logits.view(self.shape)
        return self._made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTRIBUTES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        logits = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if logits is not None and _writes(func):
            logits.share_memory_with_views()
        if logits is not None and logits._made is None:
            deferred = _defer(logits, func, args[1:], kwargs)
            if deferred is not None:
                return deferred
        args, kwargs = torch.utils._pytree.tree_map_only(
            DeferredLogits, DeferredLogits.made, (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(
            DeferredLogits, DeferredLogits.made, (args, kwargs or {})
        )
        return func(*args, **kwargs)


class _Deferral(torch.autograd.Function):
    """The node of logits that are not made: for losses that are autograd functions themselves."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, leading: Any, *tensors: Tensor | None) -> Any:
        ctx.recipe = recipe
        ctx.save_for_backward(*tensors)
        return torch.Tensor._make_wrapper_subclass(
            DeferredLogits,
            (*leading, recipe.weight.shape[0]),
            dtype=recipe.dtype,
            device=recipe.hidden.device,
        )

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        leaves = [
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with torch.enable_grad():
            logits = ctx.recipe.make(*leaves)
        found = iter(torch.autograd.grad(logits, wanted, grad.reshape(logits.shape)))
        return (None, None, *(next(found) if need else None for need in needs))


_ATTRIBUTES = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_cuda",
        "ndim",
        "layout",
        "grad_fn",
    )
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}
_CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.bfloat16: torch.bfloat16}
_SCALINGS = {
    torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul,
    torch.Tensor.div, torch.Tensor.__truediv__, torch.div, torch.Tensor.true_divide,
}  # fmt: skip
_POINTWISE = {torch.tanh, torch.Tensor.tanh}
_RESHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function of tensors writes to its first argument: ``add_``, ``x[i] = y``."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _IN_PLACE
    return name.endswith("_") and name != "requires_grad_"


_IN_PLACE = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow")}


def _defer(
    logits: DeferredLogits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the result of ``func`` without making the logits, None if it needs them."""
    recipe, leading = logits._recipe, tuple(logits.shape[:-1])
    if func in _CASTS and not args and not kwargs:
        return DeferredLogits.of(_cast(recipe, _CASTS[func]), leading)
    if func is torch.Tensor.to and len(args) == 1 and not kwargs:
        target = torch.device(args[0]) if isinstance(args[0], str) else args[0]
        if target == logits.device:
            return logits
        if isinstance(target, torch.dtype) and target.is_floating_point:
            return DeferredLogits.of(_cast(recipe, target), leading)
        return None
    if func in _POINTWISE and not args and not kwargs:
        return DeferredLogits.of(replace(recipe, steps=(*recipe.steps, (func, (), {}))), leading)
    if func in _SCALINGS and len(args) == 1 and type(args[0]) in (int, float) and not kwargs:
        return DeferredLogits.of(replace(recipe, steps=(*recipe.steps, (func, args, {}))), leading)
    if func is torch.Tensor.contiguous and not args:
        return logits
    if func in _RESHAPES and not kwargs:
        return _reshape(logits, args)
    if func is torch.Tensor.__getitem__:
        return _index(logits, args[0])
    if func is F.cross_entropy:
        return _cross_entropy(logits, *args, **kwargs)
    return None


def _cast(recipe: _Recipe, dtype: torch.dtype) -> _Recipe:
    return replace(recipe, steps=(*recipe.steps, (torch.Tensor.to, (dtype,), {})), dtype=dtype)


def _reshape(logits: DeferredLogits, args: tuple[Any, ...]) -> DeferredLogits | None:
    shape = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    vocabulary = logits.shape[-1]
    if not shape or shape[-1] not in (vocabulary, -1) or not all(type(n) is int for n in shape):
        return None
    if shape[-1] == -1 and -1 in shape[:-1]:
        return None
    recipe = logits._recipe
    try:
        hidden = recipe.hidden.reshape(*shape[:-1], recipe.hidden.shape[-1])
    except RuntimeError:
        return None  # the real logits will raise the error that the user should see
    reshaped = DeferredLogits.of(replace(recipe, hidden=hidden), hidden.shape[:-1])
    axes = tuple(reshaped.shape)  # not the tensor itself, which the view would hold on to
    return reshaped.view_of(logits, lambda made: made.reshape(axes))


def _index(logits: DeferredLogits, index: Any) -> DeferredLogits | None:
    """Slices that leave the vocabulary whole, such as ``logits[..., :-1, :]``."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, slice) or i is Ellipsis for i in index):
        return None
    if Ellipsis not in index and len(index) < logits.dim():
        index = (*index, Ellipsis)
    if index[-1] is Ellipsis and len(index) > logits.dim():
        index = index[:-1]  # it stands for no axis: the one before it is the vocabulary's
    if index[-1] is not Ellipsis and index[-1] != slice(None):
        return None
    hidden = logits._recipe.hidden[index]
    cut = DeferredLogits.of(replace(logits._recipe, hidden=hidden), hidden.shape[:-1])
    return cut.view_of(logits, lambda made: made[index])


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if logits.dim() != 2 or weight is not None or size_average is not None or reduce is not None:
        return None
    if reduction not in ("mean", "sum", "none") or target.is_floating_point():
        return None
    recipe = logits._recipe
    if target.shape != recipe.hidden.shape[:-1]:
        return None
    if not target.is_cuda:  # there, looking at them here would wait for the whole forward
        check_labels(target, ignore_index, logits.shape[-1])
    job = LossJob(
        hidden=recipe.hidden,
        weight=recipe.weight,
        bias=recipe.bias,
        steps=recipe.steps,
        target=target,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        is_compiled=recipe.is_compiled,
        wants_gradient=torch.is_grad_enabled(),
    )
    if reduction == "none":
        return chunked_token_losses(job).to(logits.dtype)
    loss = chunked_loss_sum(job)
    return loss if reduction == "sum" else loss / (target != ignore_index).sum()


def deferred_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_compiled: bool,
    is_current: Callable[[], bool],
) -> DeferredLogits:
    """Return the logits of ``hidden`` (..., hidden) under the head, to be made when needed."""
    recipe = _Recipe(
        hidden=hidden,
        weight=weight,
        bias=bias,
        dtype=weight.dtype,
        is_compiled=is_compiled,
        is_current=is_current,
    )
    return DeferredLogits.of(recipe, hidden.shape[:-1])
