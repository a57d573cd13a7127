"""Which stored tensors make up each parameter: one of its own name, one of another, or several.

Mixtures of experts are stored expert by expert and are one tensor in memory. Transformers knows
which names belong together; what it does with them is no more than to lay them side by side, so
they are read straight into their homes, like all others. What it would have to compute is not
covered here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outcore.weights.checkpoint_files import CheckpointFiles

Shape = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """A stored tensor, and the element of the parameter that its values begin with."""

    name: str
    first: int


Layout = dict[str, list[StoredPiece]]
"""By the names of parameters, tied ones too, and of persistent buffers."""


def stored_layout(model: Any, files: CheckpointFiles) -> Layout | None:
    """Return which tensors of the files make up the model; None where they must be converted."""
    if files.holds_all(model):
        names = [name for name in model.state_dict() if files.holds(name)]
        return {name: [StoredPiece(name=name, first=0)] for name in names}
    layout = _renamed_layout(model, files.shapes())
    if layout is not None:
        files.check_types(piece.name for pieces in layout.values() for piece in pieces)
    return layout


def _renamed_layout(model: Any, shapes: Mapping[str, Shape]) -> Layout | None:
    """Return the layout by the rules of transformers; None where it does more than to place."""
    rules = _rules_for(model)
    if rules is None:
        return None
    found = rules.group(shapes)
    layout: Layout = {}
    for target, groups in found.items():
        pieces = rules.pieces(groups, shapes, rules.wanted[target].shape)
        if pieces is None:
            return None
        layout[target] = pieces
    if any(name not in layout for name, _ in model.named_parameters()):
        return None
    return layout


def _rules_for(model: Any) -> _Rules | None:
    """Return what transformers would do with the names; None for versions that say it otherwise."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        transforms = get_model_conversion_mapping(model)
    except (ImportError, AttributeError, TypeError):
        return None
    return _Rules(
        wanted=model.state_dict(),
        prefix=model.base_model_prefix,
        renamings=[one for one in transforms if isinstance(one, WeightRenaming)],
        converters=[one for one in transforms if isinstance(one, WeightConverter)],
        rename=rename_source_key,
    )


Groups = Mapping[str | None, list[str]]
"""Stored names by the pattern that matched them; None: by no more than a change of name."""


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """How stored names become those of a model, and what becomes of several with one name."""

    wanted: dict[str, Tensor]  # by the model's names, without values
    prefix: str
    renamings: list[Any]
    converters: list[Any]
    rename: Callable[..., tuple[str, str | None]]

    def group(self, names: Mapping[str, Shape]) -> dict[str, Groups]:
        """Return the stored names of each of the model's, in the order of their numbers."""
        found: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(names, key=_by_number):
            target, pattern = self.rename(
                name, self.renamings, self.converters, self.prefix, self.wanted
            )
            if target not in self.wanted and name in self.wanted:
                target, pattern = name, None
            if target in self.wanted:
                found[target][pattern].append(name)
        return dict(found)

    def pieces(
        self, groups: Groups, shapes: Mapping[str, Shape], whole: Shape
    ) -> list[StoredPiece] | None:
        """Return where the stored tensors of one of the model's lie in it; None: not only there."""
        if None in groups:
            names = groups[None]
            is_one = len(groups) == len(names) == 1 and list(shapes[names[0]]) == list(whole)
            return [StoredPiece(name=names[0], first=0)] if is_one else None
        converter = next(
            (c for c in self.converters if set(groups) <= set(c.source_patterns)), None
        )
        if converter is None or len(converter.target_patterns) != 1:
            return None
        in_order = [groups[pattern] for pattern in converter.source_patterns if pattern in groups]
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
        if steps == [("MergeModulelist", 0), ("Concatenate", 1)] or (
            steps == [("MergeModulelist", 0)] and len(in_order) == 1
        ):
            return _stacked(in_order, shapes, whole)
        if steps == [("Concatenate", 0)]:
            return _joined([name for names in in_order for name in names], shapes, whole)
        return None


def _stacked(
    lists: list[list[str]], shapes: Mapping[str, Shape], whole: Shape
) -> list[StoredPiece] | None:
    """Lay the first tensors of all lists one below the other, behind them the second ones, ..."""
    count, *one = whole
    if any(len(names) != count for names in lists):
        return None
    pieces = []
    for index, names in enumerate(zip(*lists, strict=True)):
        joined = _joined(names, shapes, one)
        if joined is None:
            return None
        start = index * math.prod(one)
        pieces += [StoredPiece(name=piece.name, first=start + piece.first) for piece in joined]
    return pieces


def _joined(
    names: Sequence[str], shapes: Mapping[str, Shape], whole: Shape
) -> list[StoredPiece] | None:
    """Lay tensors one below the other; None unless they fill the whole."""
    if not whole or any(len(shapes[n]) != len(whole) for n in names):
        return None
    if any(list(shapes[n][1:]) != list(whole[1:]) for n in names):
        return None
    if sum(shapes[n][0] for n in names) != whole[0]:
        return None
    row, first, pieces = math.prod(whole[1:]), 0, []
    for name in names:
        pieces.append(StoredPiece(name=name, first=first))
        first += shapes[name][0] * row
    return pieces


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    """Sort by parts of the name; numbers by their values, as transformers does."""
    return [
        (False, int(part), "") if part.isdecimal() and len(part) < 10 else (True, 0, part)
        for part in name.split(".")
    ]
