"""What the next smaller device budget would cost: the plan beside a second one.

Owns the choice of that budget and the words about it; the second plan is made by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.planning.plan import Plan
from outcore.units import format_bytes, format_rate, format_seconds

GIB = 2**30

# What devices have, and a few sizes below the smallest of them.
USUAL_BUDGETS_GIB = (2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 288)


@dataclass(frozen=True, kw_only=True)
class SmallerBudget:
    """The next smaller device budget, with its plan or the reason why there is none."""

    device_bytes: int
    plan: Plan | None = None
    refusal: str = ""

    def sentence(self, plan: Plan) -> str:
        """Return what it would cost against ``plan``."""
        size = format_bytes(self.device_bytes)
        if self.plan is None:
            reason = self.refusal[:1].upper() + self.refusal[1:]
            return f"With {size} of device memory it does not fit. {reason}".rstrip()
        before_s, after_s = plan.prediction.step_s, self.plan.prediction.step_s
        if before_s <= 0:
            return f"With {size} of device memory a step takes {format_seconds(after_s)} s."
        change = after_s / before_s - 1
        tokens_per_s = self.plan.prediction.tokens_per_s
        if abs(change) < 0.005:
            return f"With {size} of device memory a step takes as long as now."
        word = "longer" if change > 0 else "less"
        return (
            f"With {size} of device memory a step takes {format_seconds(after_s)} s, "
            f"{abs(change):.0%} {word} ({format_rate(tokens_per_s)} tokens/s)."
        )


def next_smaller_bytes(plan: Plan, budget: int | None) -> int | None:
    """Return the largest usual budget that this plan would not fit into, below its own."""
    used = plan.tier_bytes("device")
    limit = min(size for size in (used, budget) if size) if used or budget else 0
    below = [size * GIB for size in USUAL_BUDGETS_GIB if size * GIB < limit]
    return below[-1] if below else None
