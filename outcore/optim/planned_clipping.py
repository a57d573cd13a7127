"""What to say where the optimizer does not do what its plan was made for.

A plan with clipping counts gradients that wait for the whole backward; one without, or with
clipping in two passes, does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from outcore.errors import OutOfBudget
from outcore.units import format_bytes


@contextmanager
def built_as_planned(
    *, plans_waiting: bool | None, updates_during_backward: bool, gradient_bytes: int
) -> Iterator[None]:
    """Build state inside: warns of another plan if it fits, says so in the error if it does not.

    ``plans_waiting``: None where there is no plan. ``gradient_bytes``: of all parameters.
    """
    if plans_waiting is None or plans_waiting != updates_during_backward:
        yield
        return
    if updates_during_backward:
        said = (
            "The plan was made for gradients that wait for clipping, but with "
            f"update_during_backward=True none does: the plan counts "
            f"{format_bytes(gradient_bytes)} for them. With outcore.plan(..., clipping=False), or "
            'clipping="two-pass", this memory would be used.'
        )
    else:
        said = (
            "The plan was made for updates during the backward, but this AdamW lets "
            f"{format_bytes(gradient_bytes)} of gradients wait for the whole backward, which the "
            "plan does not count. Pass update_during_backward=True, or make the plan with "
            "clipping=True."
        )
    try:
        yield
    except OutOfBudget as error:
        raise OutOfBudget(f"{error} {said}") from error
    warnings.warn(said, stacklevel=4)
