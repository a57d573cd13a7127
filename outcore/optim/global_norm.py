"""The norm of all gradients of a step: by what it is clipped, or why it is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it

Key = tuple[int, str]
"""What arrives together: a unit's index, and of an edge the name of its parameter."""


@dataclass(frozen=True, kw_only=True)
class GlobalNorm:
    value: float  # NaN where a gradient is not finite
    not_finite_in: str  # the names of those, with commas

    @classmethod
    def of(cls, squares: Mapping[Key, float], name_of: Callable[[Key], str]) -> GlobalNorm:
        """``squares``: the squared norm of each gradient."""
        bad = sorted({name_of(key) for key, square in squares.items() if not math.isfinite(square)})
        value = math.nan if bad else math.sqrt(math.fsum(squares.values()))
        return cls(value=value, not_finite_in=", ".join(bad))

    @property
    def is_finite(self) -> bool:
        return not self.not_finite_in

    def clip_factor(self, most: float | None) -> float:
        """Return the factor for all gradients after which their norm is ``most`` or less."""
        return 1.0 if most is None else min(1.0, most / (self.value + _EPS))
