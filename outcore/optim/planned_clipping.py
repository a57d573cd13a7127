"""What to say where the optimizer does not do what its plan was made for.

A plan with clipping counts gradients that wait for the whole backward; one without, or with
clipping in two passes, does not.
"""

from __future__ import annotations

from outcore.units import format_bytes


def other_than_planned(
    *, plans_waiting: bool | None, updates_during_backward: bool, gradient_bytes: int
) -> str | None:
    """Return how the optimizer differs from its plan and what to do; None if it does not.

    ``plans_waiting``: None where there is no plan. ``gradient_bytes``: of all parameters.
    """
    if plans_waiting is None or plans_waiting != updates_during_backward:
        return None
    if updates_during_backward:
        return (
            "The plan was made for gradients that wait for clipping, but with "
            f"update_during_backward=True none does: the plan counts "
            f"{format_bytes(gradient_bytes)} for them. With outcore.plan(..., clipping=False), or "
            'clipping="two-pass", this memory would be used.'
        )
    return (
        "The plan was made for updates during the backward, but this AdamW lets "
        f"{format_bytes(gradient_bytes)} of gradients wait for the whole backward, which the "
        "plan does not count. Pass update_during_backward=True, or make the plan with "
        "clipping=True."
    )
