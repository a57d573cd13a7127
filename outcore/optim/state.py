"""The optimizer state of one unit: flat tensors of a format over its trainable prefix, in one tier.

With a bf16 weight and a 16-bit remainder as the fp32 master, exact state comes to 12 bytes a
parameter with the streamed weight stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.optim.state_format import StateFormat, StateTensor
from outcore.store.host_arena import OUT_OF_HOST, HostArena, aligned_bytes
from outcore.store.ledger import Ledger
from outcore.stream.disk_tensors import DiskShape, DiskTensor, DiskTensors
from outcore.stream.unit import Unit

_BUILDERS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitState:
    """What an update reads and writes.

    ``weight`` is the storage that the update writes: the unit's own host or device weights, or,
    where a resident unit is updated on the host, the host's master copy of them. ``rest`` are the
    format's tensors.
    """

    format: StateFormat
    weight: Tensor
    rest: tuple[Tensor, ...]
    on_disk: tuple[DiskTensor | None, ...] = ()  # as tensors(), which are then mapped views

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what an update reads and writes, weight first."""
        return (self.weight, *self.rest)

    def cut(self, start: int, end: int) -> list[Tensor]:
        """Return ``tensors()`` for parameters [start, end)."""
        return self.format.cut(self.tensors(), start, end)

    @property
    def weight_on_disk(self) -> DiskTensor | None:
        return self.on_disk[0] if self.on_disk else None

    @property
    def rest_on_disk(self) -> dict[str, DiskTensor]:
        """What of ``rest`` is on disk, by name."""
        names = (kind.name for kind in self.format.tensors)
        pairs = zip(names, self.on_disk[1:], strict=False)  # none where only weights are there
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def named(self) -> Iterator[tuple[StateTensor, Tensor]]:
        return zip(self.format.tensors, self.rest, strict=True)


def build_on_host(
    units: Sequence[Unit], format: StateFormat, *, ledger: Ledger, pin: bool
) -> dict[int, UnitState]:
    """Allocate the state of ``units`` in host memory, an arena for each; by unit.

    Touching one arena's pages runs beside pinning another's.
    """
    sizes = [_host_bytes(unit, format) for unit in units]
    ledger.check("optimizer state", sum(sizes), remedy=OUT_OF_HOST)  # before any is allocated
    device = torch.cuda.current_device() if pin else None

    def begin() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread's is the first: not ours to take memory of

    with ThreadPoolExecutor(_BUILDERS, initializer=begin) as builders:
        built = builders.map(
            lambda unit, size: _on_host(unit, format, size, ledger, pin), units, sizes
        )
        return {unit.index: state for unit, state in zip(units, built, strict=True)}


def _host_bytes(unit: Unit, format: StateFormat) -> int:
    numel = unit.layout.trainable_numel
    total = sum(
        aligned_bytes(kind.numel(numel), kind.dtype)
        for kind in format.tensors
        if kind.name != "remainder" or unit.remainder is None
    )
    if unit.host_weight is None:
        total += aligned_bytes(numel, unit.dtype)
    return total


def _on_host(
    unit: Unit, format: StateFormat, num_bytes: int, ledger: Ledger, pin: bool
) -> UnitState:
    arena = HostArena(num_bytes, purpose="optimizer state", ledger=ledger, pin=pin)
    numel = unit.layout.trainable_numel
    if unit.host_weight is not None:
        weight = unit.host_weight[:numel]
    else:
        assert unit.device_weight is not None
        weight = arena.span(numel, unit.dtype)
        weight.copy_(unit.device_weight[:numel])
    rest = []
    for kind in format.tensors:
        if kind.name == "remainder" and unit.remainder is not None:
            rest.append(unit.remainder)
        else:
            rest.append(arena.span(kind.numel(numel), kind.dtype))
        if kind.name == "remainder":
            unit.remainder = rest[-1]
    on_disk = () if unit.disk_weight is None else (unit.disk_weight,)
    return UnitState(format=format, weight=weight, rest=tuple(rest), on_disk=on_disk)


def build_on_device(
    units: Sequence[Unit], format: StateFormat, *, device: torch.device, ledger: Ledger
) -> dict[int, UnitState]:
    """Allocate the state of ``units`` in device memory; by unit."""
    ledger.take(
        "optimizer state",
        sum(format.num_bytes(unit.layout.trainable_numel) for unit in units),
        remedy='Use state="host", or a larger device_memory.',
    )
    states = {}
    for unit in units:
        numel = unit.layout.trainable_numel
        rest = []
        for kind in format.tensors:
            tensor = torch.zeros(kind.numel(numel), dtype=kind.dtype, device=device)
            if kind.name == "remainder":
                if unit.remainder is not None:
                    tensor.copy_(unit.remainder)
                unit.remainder = tensor
            rest.append(tensor)
        home = unit.device_weight if unit.device_weight is not None else unit.host_weight
        assert home is not None
        states[unit.index] = UnitState(format=format, weight=home[:numel], rest=tuple(rest))
    return states


def disk_shapes(unit: Unit, format: StateFormat) -> list[DiskShape]:
    """Return the tensors of a unit that ``build_on_disk`` needs, in the order of tensors()."""
    numel = unit.layout.trainable_numel
    piece_numel = unit.piece_numel(format.max_piece_elements)
    shapes = [
        DiskShape(numel=kind.numel(numel), dtype=kind.dtype, piece_numel=kind.numel(piece_numel))
        for kind in format.tensors
    ]
    if unit.host_weight is None:  # the master of a resident weight
        shapes.insert(0, DiskShape(numel=numel, dtype=unit.dtype, piece_numel=piece_numel))
    return shapes


def build_on_disk(
    units: Sequence[Unit], format: StateFormat, disk: DiskTensors
) -> dict[int, UnitState]:
    """Lay the state of ``units`` out over tensors of ``disk_shapes``; by unit."""
    tensors = iter(disk.tensors)
    states = {}
    for unit in units:
        numel = unit.layout.trainable_numel
        weight = unit.disk_weight
        if unit.host_weight is None:
            assert unit.device_weight is not None
            weight = next(tensors)
            weight.write(unit.device_weight[:numel].cpu())
        rest = []
        for kind in format.tensors:
            rest.append(next(tensors))
            if kind.name == "remainder":
                if unit.remainder is not None:
                    rest[-1].write(unit.remainder)
                unit.remainder = rest[-1].mapped
        on_host = unit.host_weight if weight is None else weight.mapped
        assert on_host is not None
        states[unit.index] = UnitState(
            format=format,
            weight=on_host[:numel],
            rest=tuple(tensor.mapped for tensor in rest),
            on_disk=(weight, *rest),
        )
    return states
