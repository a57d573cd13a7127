"""Whether weights are numbers: where they are not, no step that is skipped makes them so."""

from __future__ import annotations

from typing import Any

from outcore.checkpoint.contents import trained_units

_ELEMENTS_AT_A_TIME = 1 << 24  # looking at them makes copies of as many


def first_not_finite(model: Any) -> str | None:
    """Return the name of a trained parameter that holds a NaN or an infinity, if one does."""
    for unit in trained_units(model):
        for field in unit.layout.trainable:
            values = unit.parameters[field.name].detach().reshape(-1)
            if not all(part.isfinite().all() for part in values.split(_ELEMENTS_AT_A_TIME)):
                return unit.full_name(field.name)
    return None
