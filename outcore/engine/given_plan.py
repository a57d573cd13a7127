"""A plan as it was given to ``offload``: read from its file, and checked against the model."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from outcore.blocks import find_parts
from outcore.planning.plan import Plan
from outcore.planning.plan_json import read_plan

_ANEW = "make the plan for this model: outcore.plan(model, ...)"


def given_plan(plan: Any) -> Plan | None:
    """Return the plan itself, or the one in the JSON file that a text or path names."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, PathLike)):
        raise TypeError(
            "plan must be what outcore.plan returned, or the path of a JSON file that "
            f"`outcore plan --json` wrote, not {type(plan).__name__}"
        )
    try:
        return read_plan(Path(plan))
    except OSError as error:
        raise ValueError(
            f"the plan {str(plan)!r} cannot be read: {error.strerror}. Write one with "
            f"`outcore plan MODEL --json {plan}`."
        ) from None


def check_plan_is_for(plan: Plan, model: nn.Module) -> None:
    """Refuse a plan that was made for other blocks: its bytes would be wrong."""
    blocks = [part for part in find_parts(model) if part.is_block]
    if len(plan.blocks) != len(blocks):
        raise ValueError(
            f"the plan for {plan.model} has {len(plan.blocks)} blocks, but the model has "
            f"{len(blocks)} blocks: {_ANEW}"
        )
    for part, planned in zip(blocks, plan.block_parameters, strict=False):  # may be unknown
        found = sum(parameter.numel() for parameter in part.parameters.values())
        if found != planned:
            raise ValueError(
                f"the plan for {plan.model} has {planned:,} parameters where {part.name} has "
                f"{found:,}: {_ANEW}"
            )
    width = _hidden_size(model)
    if plan.hidden_size is not None and width is not None and plan.hidden_size != width:
        raise ValueError(
            f"the plan for {plan.model} has hidden states of {plan.hidden_size}, the model of "
            f"{width}: {_ANEW}"
        )


def _hidden_size(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text, "hidden_size", None)
    return width if isinstance(width, int) else None
