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
from outcore.stream.disk_tensors import DiskShape, DiskTensor, DiskTensors
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
    on_disk: tuple[DiskTensor | None, ...] = ()  # as tensors(), which are then mapped views

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
        on_disk=() if unit.disk_weight is None else (unit.disk_weight,),
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


def disk_shapes(units: Sequence[Unit], max_numel: int) -> list[DiskShape]:
    """Return the tensors that ``build_on_disk`` needs, unit by unit in the order of tensors()."""
    shapes = []
    for unit in units:
        dtypes = [torch.float32, torch.float32]
        if unit.dtype == torch.bfloat16:
            dtypes.insert(0, torch.int16)
        if unit.host_weight is None:
            dtypes.insert(0, unit.dtype)  # the master of a resident weight
        numel, piece_numel = unit.layout.trainable_numel, unit.piece_numel(max_numel)
        shapes += [DiskShape(numel=numel, dtype=d, piece_numel=piece_numel) for d in dtypes]
    return shapes


def build_on_disk(units: Sequence[Unit], disk: DiskTensors) -> dict[int, UnitState]:
    """Lay the state of ``units`` out over tensors of ``disk_shapes``; by unit."""
    tensors = iter(disk.tensors)
    states = {}
    for unit in units:
        numel = unit.layout.trainable_numel
        weight, remainder = unit.disk_weight, None
        if unit.host_weight is None:
            assert unit.device_weight is not None
            weight = next(tensors)
            weight.write(unit.device_weight[:numel].cpu())
        if unit.dtype == torch.bfloat16:
            remainder = next(tensors)
            if unit.remainder is not None:
                remainder.write(unit.remainder)
            unit.remainder = remainder.mapped
        exp_avg, exp_avg_sq = next(tensors), next(tensors)
        on_host = unit.host_weight if weight is None else weight.mapped
        assert on_host is not None
        states[unit.index] = UnitState(
            weight=on_host[:numel],
            remainder=unit.remainder,
            exp_avg=exp_avg.mapped,
            exp_avg_sq=exp_avg_sq.mapped,
            on_disk=(weight, *([remainder] if remainder is not None else []), exp_avg, exp_avg_sq),
        )
    return states
