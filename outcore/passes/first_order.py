"""Gradients of gradients are refused: without a word they would be wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from outcore.errors import OutcoreError
from outcore.left_to_python import left_to_python


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let an autograd function's backward run only where its result is not differentiated again.

    torch's once_differentiable sees a gradient that depends on the incoming one only; these depend
    on what the forward saved as well.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward: create_graph
            raise OutcoreError(
                "create_graph=True: an offloaded model has first-order gradients only, because its "
                "blocks keep no graph of their backward. outcore.release(model) makes it an "
                "ordinary model again."
            )
        return backward(ctx, *grads)

    return left_to_python(checked)
