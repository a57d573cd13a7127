"""The optimizer state of one unit: master weights and two moments, flat, in one tier.

A bf16 weight and a 16-bit remainder are together the fp32 master, so that the state comes to
12 bytes a parameter with the streamed weight stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.store.host_arena import OUT_OF_HOST, HostArena, aligned_bytes
from outcore.store.ledger import Ledger
from outcore.stream.unit import Unit

_BUILDERS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitState:
    """Flat tensors over the unit's trainable prefix.

    ``weight`` is the storage that the update writes: the unit's own host or device weights, or,
    where a resident unit is updated on the host, the host's master copy of them.
    """

    weight: Tensor
    remainder: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what an update reads and writes, weight first."""
        others = (self.exp_avg, self.exp_avg_sq)
        return (self.weight, *((self.remainder,) if self.remainder is not None else ()), *others)


def build_on_host(units: Sequence[Unit], *, ledger: Ledger, pin: bool) -> dict[int, UnitState]:
    """Allocate the state of ``units`` in host memory, an arena for each; by unit.

    Touching one arena's pages runs beside pinning another's.
    """
    sizes = [_host_bytes(unit) for unit in units]
    ledger.check("optimizer state", sum(sizes), remedy=OUT_OF_HOST)  # before any is allocated
    with ThreadPoolExecutor(max_workers=_BUILDERS) as builders:
        built = builders.map(lambda unit, size: _on_host(unit, size, ledger, pin), units, sizes)
        return {unit.index: state for unit, state in zip(units, built, strict=True)}


def _host_bytes(unit: Unit) -> int:
    numel = unit.layout.trainable_numel
    total = 2 * aligned_bytes(numel, torch.float32)
    if unit.dtype == torch.bfloat16 and unit.remainder is None:
        total += aligned_bytes(numel, torch.int16)
    if unit.host_weight is None:
        total += aligned_bytes(numel, unit.dtype)
    return total


def _on_host(unit: Unit, num_bytes: int, ledger: Ledger, pin: bool) -> UnitState:
    arena = HostArena(num_bytes, purpose="optimizer state", ledger=ledger, pin=pin)
    numel = unit.layout.trainable_numel
    if unit.host_weight is not None:
        weight = unit.host_weight[:numel]
    else:
        assert unit.device_weight is not None
        weight = arena.span(numel, unit.dtype)
        weight.copy_(unit.device_weight[:numel])
    remainder = unit.remainder
    if unit.dtype == torch.bfloat16 and remainder is None:
        remainder = arena.span(numel, torch.int16)
    unit.remainder = remainder
    return UnitState(
        weight=weight,
        remainder=remainder,
        exp_avg=arena.span(numel, torch.float32),
        exp_avg_sq=arena.span(numel, torch.float32),
    )


def build_on_device(
    units: Sequence[Unit], *, device: torch.device, ledger: Ledger
) -> dict[int, UnitState]:
    """Allocate the state of ``units`` in device memory; by unit."""
    bytes_each = 8 + (2 if any(unit.dtype == torch.bfloat16 for unit in units) else 0)
    ledger.take(
        "optimizer state",
        bytes_each * sum(unit.layout.trainable_numel for unit in units),
        remedy='Use state="host", or a larger device_memory.',
    )
    states = {}
    for unit in units:
        numel = unit.layout.trainable_numel
        remainder = unit.remainder
        if unit.dtype == torch.bfloat16:
            source = remainder
            remainder = torch.zeros(numel, dtype=torch.int16, device=device)
            if source is not None:
                remainder.copy_(source)
        unit.remainder = remainder
        home = unit.device_weight if unit.device_weight is not None else unit.host_weight
        assert home is not None
        states[unit.index] = UnitState(
            weight=home[:numel],
            remainder=remainder,
            exp_avg=torch.zeros(numel, dtype=torch.float32, device=device),
            exp_avg_sq=torch.zeros(numel, dtype=torch.float32, device=device),
        )
    return states
