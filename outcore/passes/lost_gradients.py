"""Refuses what would lose gradients without a word.

A block is one node of the model's graph. A tensor of its inner graph that leaves it in an object
that Outcore cannot look into has no way back to the block, and one that enters so has none either.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outcore.errors import UnsupportedModel

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
_DEPTH = 5  # a cache of layers of lists of tensors, and a little more


def hidden_gradients(leaves: Iterable[Any]) -> Any | None:
    """Return the first leaf, other than a tensor, that holds tensors with gradients."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and _holds_gradient(leaf, _DEPTH):
            return leaf
    return None


def refusal(block: str, what: str, leaf: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"{block} {what} a {type(leaf).__name__} that holds tensors with gradients, and these "
        "would be lost. Gradients pass through tensors, and through tensors in tuples, lists, "
        "dicts and classes that torch.utils._pytree.register_pytree_node knows."
    )


def warn_of_attributes(block: nn.Module, described: str) -> None:
    """After a run: warn of tensors with a graph that the block put on itself.

    They are no error: most are there to be looked at.
    """
    for name, module in block.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                warnings.warn(
                    f"{described} keeps a tensor with gradients as "
                    f"{f'{name}.{attribute}'.lstrip('.')}: a loss that is made of it gives the "
                    "block no gradient; return it instead",
                    stacklevel=2,
                )
                return


def _holds_gradient(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return bool(value.requires_grad)
    if isinstance(value, _PLAIN) or depth == 0:
        return False
    return any(_holds_gradient(inner, depth - 1) for inner in _inner_values(value))


def _inner_values(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    inner = list(getattr(value, "__dict__", {}).values())
    if dataclasses.is_dataclass(value):  # it may have slots
        inner += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return inner
