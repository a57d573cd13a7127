"""What the AdamW tests share: a state to step, hostile gradients, and a comparison of bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.kernels import AdamWScalars, adamw_, split_master

NUM_STEPS = 20
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


@dataclass
class State:
    """All that one AdamW step changes."""

    weight: Tensor
    remainder: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def make(cls, n: int, *, split: bool, seed: int = 0) -> State:
        generator = torch.Generator().manual_seed(seed)
        master = torch.randn(n, generator=generator) * 0.02
        master[::97] *= 1e-40  # subnormal
        master[::101] = 0.0
        weight, remainder = split_master(master) if split else (master, None)
        return cls(weight, remainder, torch.zeros(n), torch.zeros(n))

    def tensors(self) -> dict[str, Tensor]:
        named = vars(self).items()
        return {name: tensor for name, tensor in named if tensor is not None}

    def to(self, device: str) -> State:
        """A copy on `device`, also when it is there already."""
        return State(
            **{"remainder": None, **{n: t.clone().to(device) for n, t in self.tensors().items()}}
        )

    def step(self, grad: Tensor, scalars: AdamWScalars, threads: int = 0) -> None:
        adamw_(**vars(self), grad=grad, scalars=scalars, threads=threads)


def hostile_grad(n: int, step: int, dtype: torch.dtype) -> Tensor:
    """Gradients from 1e-12 to 1e3 with zeros, and some so small that moments are subnormal."""
    generator = torch.Generator().manual_seed(1000 + step)
    exponent = torch.empty(n).uniform_(-12.0, 3.0, generator=generator)
    grad = torch.randn(n, generator=generator) * 10.0**exponent
    grad[::11] = 0.0
    grad[1::13] = torch.randn(grad[1::13].numel(), generator=generator) * 1e-20
    grad[2::17] = torch.randn(grad[2::17].numel(), generator=generator) * 1e-39
    return grad.to(dtype)


def scalars_of(step: int, grad_scale: float = 0.37) -> AdamWScalars:
    return AdamWScalars.of(
        lr=3e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=step,
        grad_scale=grad_scale,
    )


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        integer = INTEGERS[tensor.element_size()]
        differ = (tensor.cpu().view(integer) != expected[name].cpu().view(integer)).nonzero()
        assert differ.numel() == 0, f"{where}: {len(differ)} of {name} differ, from {differ[0]}"
