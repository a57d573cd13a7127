"""The values of param groups, without their parameters: read, checked, and put back on a resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outcore.optim.param_groups import check_values
from outcore.optim.saved_state import HYPERPARAMETERS

Values = dict[str, Any]
Groups = Sequence[dict[str, Any]]


def values_of(param_groups: Groups) -> list[Values]:
    return [{k: v for k, v in group.items() if k != "params"} for group in param_groups]


def check_values_of_groups(found: Sequence[Values], param_groups: Groups) -> None:
    """Raise ValueError or TypeError for what ``put_values`` could not take."""
    if len(found) != len(param_groups):
        raise ValueError(f"it has {len(found)} param groups, and {len(param_groups)} are here")
    for index, values in enumerate(found):
        if not isinstance(values, dict) or not set(HYPERPARAMETERS) <= values.keys():
            raise ValueError(f"param group {index} lacks some of {', '.join(HYPERPARAMETERS)}")
        check_values(**{name: values[name] for name in HYPERPARAMETERS})


def put_values(found: Sequence[Values], param_groups: Groups) -> None:
    for group, values in zip(param_groups, found, strict=True):
        group.update({k: _as_before(group.get(k), v) for k, v in values.items() if k != "params"})


def _as_before(before: Any, value: Any) -> Any:
    """Return a plain value in the type that a group has: schedulers compute in that of lr."""
    if isinstance(before, Tensor):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(value, list) else value
