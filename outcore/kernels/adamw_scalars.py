"""The numbers of one AdamW step, rounded to fp32 exactly once.

Every path takes its scalars from here, so none can round differently from the others.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class AdamWScalars:
    """Scalars of ``oc_adamw_scalars``; each is a Python float that fp32 holds exactly."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    decay: float
    step_size: float
    inv_sqrt_bc2: float
    grad_scale: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if _fp32(value) != value:
                raise ValueError(
                    f"{field.name}={value!r} is not an fp32 number; AdamWScalars.of() rounds it"
                )

    @classmethod
    def of(
        cls,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float = 1.0,
    ) -> AdamWScalars:
        """The scalars of step number `step`, counted from 1; `grad_scale` multiplies gradients."""
        if step < 1:
            raise ValueError(f"step={step}: steps are counted from 1")
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name}={beta}: must be at least 0 and less than 1")
        return cls(
            beta1=_fp32(beta1),
            one_minus_beta1=_fp32(1.0 - beta1),
            beta2=_fp32(beta2),
            one_minus_beta2=_fp32(1.0 - beta2),
            eps=_fp32(eps),
            decay=_fp32(1.0 - lr * weight_decay),
            step_size=_fp32(lr / (1.0 - beta1**step)),
            inv_sqrt_bc2=_fp32(1.0 / math.sqrt(1.0 - beta2**step)),
            grad_scale=_fp32(grad_scale),
        )


def _fp32(value: float) -> float:
    """The nearest fp32 number (ties to even), as a Python float."""
    return ctypes.c_float(value).value
