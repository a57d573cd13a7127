"""Scheduler states as JSON, so that resuming a run reads no pickle.

Schedulers keep numbers, lists and dictionaries, now and then with what JSON lacks: infinities,
tuples, counters with numbers as keys. Those are marked; anything else is refused by name.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

_MARK = "$"


def to_plain(value: Any, what: str) -> Any:
    """Return ``value`` as JSON can hold it; ``what`` names it in an error."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_MARK: "float", "value": repr(value)}
    if isinstance(value, list):
        return [to_plain(item, f"{what}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, (tuple, set)):
        items = [to_plain(item, f"{what}[{i}]") for i, item in enumerate(value)]
        return {_MARK: "tuple" if isinstance(value, tuple) else "set", "value": items}
    if isinstance(value, dict):
        pairs = [[to_plain(k, what), to_plain(v, f"{what}.{k}")] for k, v in value.items()]
        if isinstance(value, Counter):
            return {_MARK: "counter", "value": pairs}
        if all(isinstance(key, str) and key != _MARK for key in value):
            return dict(pairs)
        return {_MARK: "dict", "value": pairs}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return to_plain(value.item(), what)  # a number of numpy or torch
    raise ValueError(
        f"{what} is {type(value).__name__}, which a checkpoint without pickles cannot hold: give "
        "the scheduler a state_dict of numbers, texts, lists and dictionaries"
    )


def from_plain(value: Any) -> Any:
    """Return what ``to_plain`` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: from_plain(item) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    items = [from_plain(item) for item in value["value"]]
    if kind in ("dict", "counter"):
        made = {key: item for key, item in items}
        return Counter(made) if kind == "counter" else made
    return tuple(items) if kind == "tuple" else set(items)
