"""Homes for a model whose batch is not known yet: those of a plan for a usual batch.

Only homes come from that plan. How many blocks keep their activations and how much state lodges on
the device is decided after the first step, when the batch has been seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outcore.errors import DoesNotFit
from outcore.planning.plan import Plan

USUAL_TOKENS = (32_768, 8_192)  # a step; the second where the first does not fit
USUAL_SEQ_LEN = 2_048

DEFAULTS: dict[str, Any] = {"weights": "host", "state": "host", "activations": "auto"}
"""Homes without a plan."""


def is_left_open(options: dict[str, Any]) -> bool:
    """Whether the user has said nothing about homes and activations."""
    return all(options[name] is None for name in DEFAULTS)


def without_plan(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` with the default homes where none is given."""
    filled = {name: default for name, default in DEFAULTS.items() if options[name] is None}
    return {**options, **filled}


def usual_homes(options: dict[str, Any], make_plan: Callable[[int, int], Plan]) -> dict[str, Any]:
    """Return ``options`` with the homes of a plan for a usual batch; the defaults if none fits.

    ``make_plan`` takes the tokens and the sequence length of a step.
    """
    for tokens in USUAL_TOKENS:
        try:
            return _with_homes(options, make_plan(tokens, USUAL_SEQ_LEN))
        except DoesNotFit:
            continue
    return without_plan(options)


def _with_homes(options: dict[str, Any], plan: Plan) -> dict[str, Any]:
    activations: str | list[str] = "auto"
    if not _has_room_for_inputs(plan):
        # The plan counts on these inputs being away. Keeping is for a known batch only.
        activations = [
            "offload" if block.activations == "offload" else "recompute" for block in plan.blocks
        ]
    return {
        **options,
        "weights": [block.weights for block in plan.blocks],
        "state": [block.state for block in plan.blocks],
        "edge_state": plan.edge_state,
        "activations": activations,
        "num_slots": plan.num_slots,
    }


def _has_room_for_inputs(plan: Plan) -> bool:
    """Whether the inputs that the plan sends to the host fit where it keeps activations."""
    kept = plan.peak_bytes.get("device", {}).get("kept activations", 0)
    return kept >= plan.peak_bytes.get("host", {}).get("block inputs", 0)
