"""Finds weights that a custom autograd function keeps on its ``ctx`` by itself.

What it saves with ``save_for_backward`` a kept block finds again in whichever slot holds its
weights by then. Of attributes of ``ctx`` autograd tells nobody: they would go on pointing to a slot
that may have another block's weights. Compiled blocks hand such tensors on as attributes too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

_DEPTH = 4  # lists in dicts, and a little more


def function_with_weights(outputs: Iterable[Any], memory: Tensor) -> str | None:
    """Return the name of a function that made ``outputs`` and keeps tensors of ``memory``."""
    left = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
    start = memory.untyped_storage().data_ptr()
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [edge[0] for edge in node.next_functions]
        # Only functions that are written in Python have attributes.
        if any(_is_in(start, value, _DEPTH) for value in getattr(node, "__dict__", {}).values()):
            return str(node.name())
    return None


def _is_in(start: int, value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return not value.is_meta and value.untyped_storage().data_ptr() == start
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        return False
    return any(_is_in(start, inner, depth - 1) for inner in value)
