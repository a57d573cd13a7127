"""State formats: what an optimizer keeps for each parameter beside its weight, in how many bits.

"fp32" is exact: fp32 moments and an fp32 master (for bf16 weights as a 16-bit remainder).
"compact" and "minimal" have 8-bit moments with a scale for each block of parameters, and a master
of 24 or 16 bits; they round stochastically (kernels/compact_format.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outcore.kernels import BLOCK, AdamWScalars, adamw_, adamw_compact_

FORMAT_NAMES = ("fp32", "compact", "minimal")
# Elements that go to a disk and come from it as one: each moment is two requests of 8 MiB. Smaller
# ones are more work for the interpreter, whose lock others hold too.
_PIECE_ELEMENTS = {"fp32": 1 << 22, "compact": 1 << 24, "minimal": 1 << 24}


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One flat tensor of a format; ``per`` parameters share an entry."""

    name: str
    dtype: torch.dtype
    per: int = 1

    def numel(self, num_parameters: int) -> int:
        return -(-num_parameters // self.per)

    def num_bytes(self, num_parameters: int) -> int:
        return self.numel(num_parameters) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What stochastic rounding depends on, beside the element."""

    seed: int
    step: int


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """The tensors of a state beside the weight, in the order of ``UnitState.tensors()``."""

    name: str
    weight_dtype: torch.dtype
    tensors: tuple[StateTensor, ...]

    @property
    def max_piece_elements(self) -> int:
        """The most elements that go to a disk and come from it as one."""
        return max_piece_elements(self.name)

    @property
    def remainder(self) -> StateTensor | None:
        return next((t for t in self.tensors if t.name == "remainder"), None)

    def num_bytes(self, num_parameters: int) -> int:
        """Return the bytes of a state without its weight."""
        return sum(tensor.num_bytes(num_parameters) for tensor in self.tensors)

    def cut(self, tensors: Sequence[Tensor], start: int, end: int) -> list[Tensor]:
        """Return parameters [start, end) of (weight, *tensors); ``start`` begins a block."""
        weight, *rest = tensors
        return [
            weight[start:end],
            *(
                tensor[start // kind.per : -(-end // kind.per)]
                for tensor, kind in zip(rest, self.tensors, strict=True)
            ),
        ]

    def update_(
        self,
        tensors: Sequence[Tensor],
        grad: Tensor,
        scalars: AdamWScalars,
        rounding: Rounding,
        first_element: int,
    ) -> None:
        """Run AdamW over (weight, *tensors), which are overwritten, wherever they are."""
        weight, *rest = tensors
        named: dict[str, Any] = {"remainder": None}
        named |= {kind.name: tensor for kind, tensor in zip(self.tensors, rest, strict=True)}
        if self.name == "fp32":
            adamw_(weight=weight, grad=grad, scalars=scalars, **named)
        else:
            adamw_compact_(
                weight=weight,
                grad=grad,
                scalars=scalars,
                seed=rounding.seed,
                step=rounding.step,
                first_element=first_element,
                **named,
            )


def max_piece_elements(name: str) -> int:
    """Return the most elements of a format that go to a disk and come from it as one."""
    return _PIECE_ELEMENTS[name]


def state_format(name: str, weight_dtype: torch.dtype) -> StateFormat:
    """Return the format ``name`` for weights of a type."""
    if name not in FORMAT_NAMES:
        raise ValueError(
            f"state_format must be one of {', '.join(map(repr, FORMAT_NAMES))}, not {name!r}"
        )
    if name == "fp32":
        remainder = [StateTensor(name="remainder", dtype=torch.int16)]
        moments = ("exp_avg", "exp_avg_sq")
        tensors = [
            *(remainder if weight_dtype == torch.bfloat16 else []),
            *(StateTensor(name=moment, dtype=torch.float32) for moment in moments),
        ]
        return StateFormat(name=name, weight_dtype=weight_dtype, tensors=tuple(tensors))
    if weight_dtype != torch.bfloat16:
        raise ValueError(f'state_format="{name}" is for dtype=torch.bfloat16, not {weight_dtype}')
    tensors = [
        *([StateTensor(name="remainder", dtype=torch.int8)] if name == "compact" else []),
        StateTensor(name="exp_avg", dtype=torch.uint8),
        StateTensor(name="exp_avg_sq", dtype=torch.uint8),
        StateTensor(name="exp_avg_scale", dtype=torch.uint8, per=BLOCK),
        StateTensor(name="exp_avg_sq_scale", dtype=torch.uint8, per=BLOCK),
    ]
    return StateFormat(name=name, weight_dtype=weight_dtype, tensors=tuple(tensors))
