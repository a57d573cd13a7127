"""A block's own forward as a function of its weights, compiled where that pays.

Each block keeps its own module, so per-layer attributes (a layer index, an attention window) are
always its own. When compiled, the module is an argument: dynamo guards on exactly the attributes
that the forward reads, and blocks that differ in nothing it reads share one compiled graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outcore.passes.compilation import compiled


class BlockBody(nn.Module):
    """Calls a block's original forward; ``block.forward`` itself is replaced by the engine."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.original_forward = block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_forward(*args, **kwargs)


def run_body(
    body: BlockBody, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return torch.func.functional_call(body, weights, args, kwargs)


@functools.cache
def compiled_body(*, saves_little: bool) -> Callable[..., Any]:
    """Return ``run_body`` compiled; one compiled function serves every block of every model."""
    return compiled(run_body, saves_little=saves_little)
