"""What the tests of compact AdamW share: a state to step, and scalars that make a step simple."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from adamw_states import hostile_grad
from torch import Tensor

from outcore.kernels import (
    BLOCK,
    AdamWScalars,
    CompactMoments,
    adamw_compact_,
    compact_torch,
    join_master24,
    num_blocks,
    split_master24,
    zero_moments,
)
from outcore.kernels.compact_format import CompactFormat

# An array that begins here has a place where the high half of its elements' indices changes.
FIRST_ELEMENT = (1 << 32) - 10 * BLOCK


@dataclass
class CompactState:
    """All that one AdamW step over the compact state changes."""

    weight: Tensor
    remainder: Tensor | None
    moments: CompactMoments

    @classmethod
    def make(cls, n: int, format: CompactFormat, *, seed: int = 0) -> CompactState:
        generator = torch.Generator().manual_seed(seed)
        master = torch.randn(n, generator=generator) * 0.02
        master[::97] *= 1e-40  # subnormal
        master[::101] = 0.0
        return cls.of(master, format)

    @classmethod
    def of(cls, master: Tensor, format: CompactFormat) -> CompactState:
        weight, remainder = split_master24(master)
        if format == "minimal":
            weight, remainder = master.bfloat16(), None
        return cls(weight, remainder, zero_moments(master.numel()))

    def tensors(self) -> dict[str, Tensor]:
        named = {"weight": self.weight, **self.moments._asdict()}
        return named if self.remainder is None else {**named, "remainder": self.remainder}

    def master(self) -> Tensor:
        if self.remainder is None:
            return self.weight.float()
        return join_master24(self.weight, self.remainder)

    def to(self, device: str) -> CompactState:
        """A copy on `device`, also when it is there already."""
        copies = {name: tensor.clone().to(device) for name, tensor in self.tensors().items()}
        weight, remainder = copies.pop("weight"), copies.pop("remainder", None)
        return CompactState(weight, remainder, CompactMoments(**copies))

    def part(self, elements: slice) -> CompactState:
        """A view of some elements; whole blocks, but for the end."""
        blocks = slice(elements.start // BLOCK, num_blocks(elements.stop))
        return CompactState(
            self.weight[elements],
            None if self.remainder is None else self.remainder[elements],
            CompactMoments(
                *(t[elements] for t in self.moments[:2]), *(t[blocks] for t in self.moments[2:])
            ),
        )

    def step(self, grad: Tensor, scalars: AdamWScalars, **rounding: Any) -> None:
        adamw_compact_(
            weight=self.weight,
            remainder=self.remainder,
            **self.moments._asdict(),
            grad=grad,
            scalars=scalars,
            **rounding,
        )

    def step_by_torch(self, grad: Tensor, scalars: AdamWScalars, **rounding: Any) -> None:
        rounding = {"first_element": 0, **rounding}
        compact_torch.adamw_compact_(
            self.weight, self.remainder, self.moments, grad, scalars=scalars, **rounding
        )


def storing_scalars(*, step_size: float = 0.0) -> AdamWScalars:
    """A step that stores exactly m = g, v = g * g and p = p - step_size * g."""
    return AdamWScalars(
        beta1=0.0,
        one_minus_beta1=1.0,
        beta2=0.0,
        one_minus_beta2=1.0,
        eps=1.0,
        decay=1.0,
        step_size=step_size,
        inv_sqrt_bc2=0.0,
        grad_scale=1.0,
    )


def grad_of(n: int, step: int, dtype: torch.dtype) -> Tensor:
    """Hostile, with blocks that are zero at first, always, and from some step on."""
    grad = hostile_grad(n, step, dtype)
    grad[2 * BLOCK : 4 * BLOCK] = 0.0
    if step <= 5:
        grad[5 * BLOCK : 7 * BLOCK] = 0.0
    else:
        grad[8 * BLOCK : 9 * BLOCK] = 0.0
    return grad
