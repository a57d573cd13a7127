"""What to say where the optimizer does not do what its plan was made for.

A plan with clipping counts gradients that wait for the whole backward; one without does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from outcore.errors import OutOfBudget
from outcore.units import format_bytes


@contextmanager
def built_as_planned(
    *, plans_clipping: bool | None, updates_during_backward: bool, gradient_bytes: int
) -> Iterator[None]:
    """Build state inside: warns of another plan if it fits, says so in the error if it does not.

    ``plans_clipping``: None where there is no plan. ``gradient_bytes``: of all parameters.
    """
    if plans_clipping is None or plans_clipping != updates_during_backward:
        yield
        return
    if updates_during_backward:
        said = (
            "The plan was made with clipping, but update_during_backward=True does not clip: the "
            f"plan counts {format_bytes(gradient_bytes)} of gradients that will not wait. With "
            "outcore.plan(..., clipping=False) this memory would be used."
        )
    else:
        said = (
            "The plan was made without clipping, but this AdamW lets "
            f"{format_bytes(gradient_bytes)} of gradients wait for the whole backward, which the "
            "plan does not count. Pass update_during_backward=True, or make the plan with "
            "clipping=True."
        )
    try:
        yield
    except OutOfBudget as error:
        raise OutOfBudget(f"{error} {said}") from error
    warnings.warn(said, stacklevel=4)
