"""A saved optimizer state, checked whole before anything of it is loaded.

As ``torch.optim.AdamW.state_dict`` has it: ``{"state": {id: entry}, "param_groups": [group]}``,
where each group lists the ids of its parameters. A parameter without an entry had no step yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
OTHER_ALGORITHMS = ("amsgrad", "maximize")  # that torch's AdamW has under the same name


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedState:
    """What to load: steps, the values of each group, and where each tensor goes."""

    steps: list[int]  # that each parameter has seen, in the order of the groups
    groups: list[dict[str, Any]]  # without their parameters
    copies: list[tuple[Tensor, Tensor]]  # (target, value)


def check_saved_state(
    saved: Any, param_groups: Sequence[dict[str, Any]], targets: Mapping[Tensor, dict[str, Tensor]]
) -> SavedState:
    """Return what ``saved`` holds for these groups; ``targets`` are the homes by parameter."""
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"an optimizer state is what state_dict() returned, not {type(saved).__name__}"
        )
    for key, kind in (("state", Mapping), ("param_groups", (list, tuple))):
        if key not in saved:
            raise ValueError(
                f"the optimizer state has no {key!r}, only {sorted(map(repr, saved))}: load what "
                "state_dict() of an AdamW returned"
            )
        if not isinstance(saved[key], kind):
            raise ValueError(f"{key!r} of the optimizer state is {type(saved[key]).__name__}")
    groups, ids = _groups(saved["param_groups"], param_groups)
    entries = saved["state"]
    unknown = [key for key in entries if key not in set(ids)]
    if unknown:
        raise ValueError(
            f"the optimizer state has an entry for {unknown[0]!r} and {len(unknown) - 1} more that "
            "no param group lists"
        )
    for key, entry in entries.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"state of parameter {key} is {type(entry).__name__}, needs a dict")
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    copies = [
        copy
        for key, parameter in zip(ids, parameters, strict=True)
        for copy in _copies(key, entries.get(key), targets.get(parameter, {}))
    ]
    steps = [_step(key, entries[key]) if key in entries else 0 for key in ids]
    homes = [targets.get(parameter, {}) for parameter in parameters]
    if any(
        home and "remainder" in entries.get(key, {}) and "remainder" not in home
        for key, home in zip(ids, homes, strict=True)
    ):
        warnings.warn(
            "the state has the lower bits of fp32 masters (remainder), and this optimizer has no "
            "place for them: it goes on from the weights as the model has them",
            stacklevel=3,
        )
    return SavedState(steps=steps, groups=groups, copies=copies)


def _groups(
    theirs: Sequence[Any], ours: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the values of each group, and the ids of all parameters in order."""
    for index, group in enumerate(theirs):
        if not isinstance(group, Mapping):
            raise ValueError(f"param_groups[{index}] is {type(group).__name__}, needs a dict")
        for key in ("params", *HYPERPARAMETERS):
            if key not in group:
                raise ValueError(f"param_groups[{index}] of the optimizer state has no {key!r}")
        for key in OTHER_ALGORITHMS:
            if group.get(key):
                raise ValueError(
                    f"param_groups[{index}] of the optimizer state has {key}={group[key]!r}, which "
                    "outcore.AdamW does not do"
                )
        if not isinstance(group["params"], (list, tuple)):
            raise ValueError(f"param_groups[{index}]['params'] must be a list of numbers")
    sizes = [len(group["params"]) for group in theirs], [len(group["params"]) for group in ours]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"param groups of the optimizer state have {sizes[0]} parameters, this optimizer's "
            f"have {sizes[1]}"
        )
    # Copies: schedulers write into an lr that is a tensor.
    values = [{k: deepcopy(v) for k, v in group.items() if k != "params"} for group in theirs]
    return values, [key for group in theirs for key in group["params"]]


def _copies(
    key: Any, entry: Mapping[str, Any] | None, targets: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return what goes where for one parameter; without an entry its state starts anew."""
    copies = []
    for name, target in targets.items():
        if name == "step":
            continue
        value = None if entry is None else entry.get(name)
        if value is None:
            # torch's AdamW has no remainder: the weight is the whole master.
            if entry is not None and name != "remainder":
                raise ValueError(
                    f"state of parameter {key} has no {name!r}, only {sorted(map(repr, entry))}"
                )
            value = target if name == "remainder" else torch.zeros_like(target)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"state {name} of parameter {key} is {type(value).__name__}, needs a tensor"
            )
        if value.dtype != target.dtype and torch.uint8 in (value.dtype, target.dtype):
            raise ValueError(
                f"state {name} of parameter {key} is {value.dtype}, needs {target.dtype}: it was "
                "saved with another state_format"
            )
        if target.shape != value.shape:
            raise ValueError(
                f"state {name} of parameter {key} has shape {tuple(value.shape)}, needs "
                f"{tuple(target.shape)}"
            )
        copies.append((target, value))
    return copies


def _step(key: Any, entry: Mapping[str, Any]) -> int:
    """Return the steps that a parameter had seen when it was saved."""
    if "step" not in entry:
        raise ValueError(f"state of parameter {key} has no 'step'")
    try:
        step = int(entry["step"])
    except (TypeError, ValueError, OverflowError, RuntimeError):
        step = -1
    if step < 0:
        raise ValueError(f"step of parameter {key} is {entry['step']!r}, needs a whole number")
    return step
