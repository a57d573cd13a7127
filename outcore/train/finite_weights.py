"""Whether weights are numbers: where they are not, no step that is skipped makes them so."""

from __future__ import annotations

from typing import Any

from outcore.checkpoint.contents import trained_units
from outcore.checkpoint.folder import CheckpointFolder

_ELEMENTS_AT_A_TIME = 1 << 24  # looking at them makes copies of as many


def first_not_finite(model: Any) -> str | None:
    """Return the name of a trained parameter that holds a NaN or an infinity, if one does."""
    for unit in trained_units(model):
        for field in unit.layout.trainable:
            values = unit.parameters[field.name].detach().reshape(-1)
            if not all(part.isfinite().all() for part in values.split(_ELEMENTS_AT_A_TIME)):
                return unit.full_name(field.name)
    return None


def told_if_not_finite(
    model: Any, base: str, step: int, num_updates: int, folder: CheckpointFolder
) -> str | None:
    """Return what to say of the weights of ``step``, and what to do; None where all are numbers.

    num_updates: how many have been made of ``base``; checkpoints are named by them.
    """
    name = first_not_finite(model)
    if name is None:
        return None
    earlier = [kept for kept in folder.steps() if kept < num_updates]
    remedy = "begin anew in another --output, with a lower --lr"
    if not num_updates:
        remedy = f"{base} has them so"
    elif earlier:
        remedy = (
            f"remove the checkpoints behind that of step {earlier[-1]}, and --resume goes on from "
            "there, with a lower --lr"
        )
    return (
        f"The weights of step {step} are not finite (in {name}), and no further step mends that: "
        f"{remedy}."
    )
