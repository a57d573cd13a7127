"""What an optimizer is given: param groups, whose model they are of, and their values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from outcore.optim.backend import OptimizerBackend
from outcore.optim.saved_state import OTHER_ALGORITHMS

_HOW_TORCH_COMPUTES = ("foreach", "fused", "capturable")

ParamsArg = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def as_groups(params: ParamsArg) -> Any:
    """Return param groups without frozen parameters, which have no state, and without names."""
    if isinstance(params, Tensor):
        raise TypeError("AdamW takes a model, parameters in a list, or param groups, not a Tensor")
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    groups: list[Any] = list(params)
    if not groups:
        raise ValueError("AdamW got an empty parameter list")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    trimmed = []
    for group in groups:
        for option in OTHER_ALGORITHMS:
            if group.get(option):
                raise ValueError(
                    f"a param group has {option}={group[option]!r}, which outcore.AdamW does not do"
                )
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        members = [m[1] if isinstance(m, tuple) else m for m in members]  # of named_parameters()
        trimmed.append({**group, "params": [p for p in members if p.requires_grad]})
    if not any(group["params"] for group in trimmed):
        raise ValueError("AdamW got no trainable parameter: every one has requires_grad=False")
    return trimmed


def backend_of(param_groups: list[dict[str, Any]]) -> OptimizerBackend:
    """Return the backend of the offloaded model that all parameters belong to."""
    backend: OptimizerBackend | None = None
    for group in param_groups:
        for parameter in group["params"]:
            found = getattr(parameter, "_outcore", lambda: None)()
            if found is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} does not belong to an "
                    "offloaded model: call outcore.offload(model) first, and pass the model's "
                    "own parameters"
                )
            if backend is not None and found is not backend:
                raise ValueError("one AdamW cannot hold parameters of two offloaded models")
            backend = found
    assert backend is not None
    return backend


def tell_what_is_left_out(param_groups: list[dict[str, Any]], backend: OptimizerBackend) -> None:
    """Warn of trainable parameters in no group: another optimizer would see no gradient of them."""
    held = {id(parameter) for group in param_groups for parameter in group["params"]}
    left_out = [
        unit.full_name(field.name)
        for unit in backend.units
        for field in unit.layout.trainable
        if id(unit.parameters[field.name]) not in held
    ]
    if left_out:
        warnings.warn(
            f"{left_out[0]} and {len(left_out) - 1} more trainable parameters are not given to "
            "AdamW and stay as they are: an offloaded model has one optimizer, and .grad stays "
            "None for any other. Give it all that is to be trained, in param groups; freeze the "
            "rest before outcore.offload, which saves its memory.",
            stacklevel=3,
        )


def check_values(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for hyper-parameters that AdamW cannot take."""
    if not lr >= 0:
        raise ValueError(f"lr must be 0 or more, not {lr}")
    if (
        not isinstance(betas, (tuple, list))
        or len(betas) != 2
        or not all(0 <= beta < 1 for beta in betas)
    ):
        raise ValueError(f"betas must be two numbers in [0, 1), not {betas}")
    if not eps >= 0:
        raise ValueError(f"eps must be 0 or more, not {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be 0 or more, not {weight_decay}")


def check_options_of_torch(options: dict[str, Any]) -> None:
    """Refuse what torch's AdamW takes and this one does not do, and what neither takes."""
    for name, value in options.items():
        if name in (*OTHER_ALGORITHMS, "differentiable"):
            if value:
                raise ValueError(f"{name}={value!r}: outcore.AdamW does not do that")
        elif name not in _HOW_TORCH_COMPUTES:
            raise TypeError(f"AdamW has no argument {name!r}")


def check_finite(index: int, group: dict[str, Any]) -> None:
    """Raise ValueError for what a scheduler, or a user, has made of a group since it was given."""
    for name in ("lr", "eps", "weight_decay"):
        if not math.isfinite(group[name]):
            raise ValueError(
                f"param group {index} has {name}={float(group[name])}: look at what sets it, a "
                "scheduler perhaps"
            )
