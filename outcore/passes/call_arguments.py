"""The arguments of one block call, flattened; mappings among them go in and come out.

Some models hand one mapping through all their blocks: a block writes its keys and values into it,
and later blocks read them (Gemma 3n, Gemma 4). The tensors in it are inputs of the call, and what
the block writes is part of its outputs, so that gradients take the same way back. The block itself
gets a copy: the caller's mapping never holds a tensor of a block's inner graph.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import MutableMapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

Changes = dict[int, dict[Any, Any]]
"""By a mapping's position among the arguments: the values that were written, by key."""


class CallArguments:
    """Positional and keyword arguments as ``leaves``; the values in mappings are leaves too."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments, self._spec = pytree.tree_flatten(
            (args, kwargs), is_leaf=lambda x: type(x) is dict and x is not kwargs
        )
        self.leaves: list[Any] = []
        self._places: list[int | _Contents] = []
        self._of_caller: dict[int, MutableMapping[Any, Any]] = {}
        for i, argument in enumerate(arguments):
            if isinstance(argument, dict | UserDict):
                self._of_caller[i] = argument
                self._places.append(_Contents(argument, self.leaves))
            else:
                self._places.append(len(self.leaves))
                self.leaves.append(argument)

    def build(self, leaves: Sequence[Any]) -> RunArguments:
        """Return the arguments with ``leaves`` in their places, for one run of the block."""
        arguments = [
            place.mapping(leaves) if isinstance(place, _Contents) else leaves[place]
            for place in self._places
        ]
        args, kwargs = pytree.tree_unflatten(arguments, self._spec)
        mappings = {
            i: (place, arguments[i])
            for i, place in enumerate(self._places)
            if isinstance(place, _Contents)
        }
        return RunArguments(args, kwargs, mappings, leaves)

    def name_of(self, leaf: Any) -> str:
        """Return which argument holds ``leaf``, for messages."""
        given = self.build(self.leaves)
        named = {**{f"{i + 1}": value for i, value in enumerate(given.args)}, **given.kwargs}
        return next(n for n, v in named.items() if any(x is leaf for x in pytree.tree_leaves(v)))

    def hand_over(self, changes: Changes) -> None:
        """Write to the caller's mappings, and forget them.

        They hold what the call returned: were they held by the call in turn, which its node in the
        graph holds, neither would ever be freed.
        """
        for i, values in changes.items():
            mapping = self._of_caller[i]
            for key, value in values.items():
                if isinstance(value, _Deleted):
                    del mapping[key]
                else:
                    mapping[key] = value
        self._of_caller.clear()


class RunArguments:
    """Arguments that one run of the block may write to."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mappings: dict[int, tuple[_Contents, MutableMapping[Any, Any]]],
        leaves: Sequence[Any],
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self._mappings = mappings
        self._leaves = leaves

    def changes(self) -> Changes:
        """Return what the run wrote to its mappings."""
        found = {
            i: contents.changes(mapping, self._leaves)
            for i, (contents, mapping) in self._mappings.items()
        }
        return {i: values for i, values in found.items() if values}


class _Contents:
    """What a mapping held before the call: its keys, and where among the leaves its values are."""

    def __init__(self, mapping: MutableMapping[Any, Any], leaves: list[Any]) -> None:
        """Appends the mapping's values to ``leaves``."""
        self._empty = copy.copy(mapping)  # of the same class
        self._empty.clear()
        self._values: dict[Any, tuple[slice, pytree.TreeSpec]] = {}
        for key, value in mapping.items():
            start = len(leaves)
            flat, spec = pytree.tree_flatten(value)
            leaves += flat
            self._values[key] = slice(start, len(leaves)), spec

    def mapping(self, leaves: Sequence[Any]) -> MutableMapping[Any, Any]:
        mapping = copy.copy(self._empty)
        for key, (place, spec) in self._values.items():
            mapping[key] = pytree.tree_unflatten(leaves[place], spec)
        return mapping

    def changes(self, mapping: MutableMapping[Any, Any], leaves: Sequence[Any]) -> dict[Any, Any]:
        changed: dict[Any, Any] = {key: _Deleted() for key in self._values if key not in mapping}
        for key, value in mapping.items():
            if not self._is_unchanged(key, value, leaves):
                changed[key] = value
        return changed

    def _is_unchanged(self, key: Any, value: Any, leaves: Sequence[Any]) -> bool:
        if key not in self._values:
            return False
        place, spec_before = self._values[key]
        flat, spec = pytree.tree_flatten(value)
        return spec == spec_before and all(
            now is before for now, before in zip(flat, leaves[place], strict=True)
        )


class _Deleted:
    """Stands for the value of a key that a block removed."""
