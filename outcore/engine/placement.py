"""Moving a model's parameters into their homes, one unit at a time.

Everything that can be refused is refused before the first parameter is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from outcore.blocks import Part, end_module, find_parts, runs_as_block
from outcore.engine.options import OffloadOptions
from outcore.engine.packed_parameters import Replaced, replace_parameter
from outcore.engine.places import Place, places_in
from outcore.errors import UnsupportedModel
from outcore.kernels.packed_format import PackedFormat, check_range
from outcore.optim.backend import MakeDisk
from outcore.optim.disk_updater import NUM_STAGED_WEIGHTS
from outcore.optim.state_format import StateTensor
from outcore.store.host_arena import OUT_OF_HOST, HostArena, aligned_bytes, made_ahead
from outcore.store.ledger import Ledger
from outcore.store.packed_spans import MIN_ELEMENTS, PackedLayout, is_packable
from outcore.store.spans import SpanLayout
from outcore.stream.disk_tensors import DiskShape
from outcore.stream.unit import Unit

MOVING_IN = "state moving in"
"""Host memory of what bf16 rounds away, until a home elsewhere takes it."""

Places = Mapping[str, Place]
"""By the names of a part's parameters."""


class Source(Protocol):
    """Gives the values of parts whose parameters are on the meta device."""

    @property
    def is_on_host(self) -> bool:
        """Whether values come from host memory, and not from the device."""
        ...

    def is_wider_than_bf16(self, part: Part) -> bool: ...

    def fill(self, wanted: Sequence[tuple[Part, Places]]) -> Iterator[Part]:
        """Put the values of each part's parameters in their places; yield the parts that are done.

        A part that was yielded has got other parameters when the next one is asked for.
        """
        ...


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def build_units(model: nn.Module, options: OffloadOptions) -> list[Unit]:
    """Return the model's units, with no memory yet."""
    ends = [end_module(model, "input"), end_module(model, "output")]
    units: list[Unit] = []
    first_element = 0
    for part in find_parts(model):
        for name, parameter in part.parameters.items():
            if parameter.dtype not in _DTYPES:
                raise UnsupportedModel(
                    f"parameter {part.name}.{name} is {parameter.dtype}: only fp32, bf16, fp16 and "
                    "fp64 weights can be offloaded. Load the model unquantized."
                )
        plain, packed = _split(part, options.frozen_weights)
        units.append(
            Unit(
                index=len(units),
                part=part,
                arrives_whole=part.is_block or runs_as_block(part, ends),
                layout=SpanLayout.of(plain),
                packed=packed,
                dtype=options.dtype,
                first_element=first_element,
                is_urgent=not any(unit.part.is_block for unit in units),
                weights_home="device",
                state_home=options.edge_state,
            )
        )
        first_element += units[-1].layout.trainable_numel
    blocks = [unit for unit in units if unit.part.is_block]
    if options.frozen_weights is not None and all(unit.packed is None for unit in units):
        raise ValueError(
            f'frozen_weights="{options.frozen_weights.name}", but no block has a frozen matrix of '
            f"{MIN_ELEMENTS:,} elements or more: add adapters or freeze the base "
            "(requires_grad_(False)) first"
        )
    homes = (options.for_blocks(name, len(blocks)) for name in ("weights", "state"))
    for unit, weights, state in zip(blocks, *homes, strict=True):
        unit.weights_home, unit.state_home = weights, state
    if options.activations != "auto":
        options.for_blocks("activations", len(blocks))  # refuses a list of another length
    return units


def _split(
    part: Part, format: PackedFormat | None
) -> tuple[dict[str, nn.Parameter], PackedLayout | None]:
    """Return the part's plain parameters, and the layout of those that are packed."""
    if format is None or not part.is_block:
        return part.parameters, None
    packed = {name: p for name, p in part.parameters.items() if is_packable(name, p)}
    plain = {name: p for name, p in part.parameters.items() if name not in packed}
    return plain, PackedLayout.of(packed, format) if packed else None


def place_units(
    units: list[Unit],
    options: OffloadOptions,
    *,
    host_ledger: Ledger,
    device_ledger: Ledger,
    source: Source | None = None,
    make_disk: MakeDisk | None = None,
) -> Replaced:
    """Allocate every unit's home, then move the weights into it.

    ``source`` gives the tensors of a part whose parameters are on the meta device; such parameters
    are replaced, and returned beside what replaced them.
    """
    if source is None:
        _check_packable_values(units)
    streamed = [u for u in units if u.weights_home == "host"]
    on_disk = [u for u in units if u.weights_home == "disk"]
    remainder = options.state_format.remainder
    with_remainder = [u for u in units if _needs_remainder(u, source)] if remainder else []
    pin = options.device.type == "cuda"
    resident = [u for u in units if u.weights_home == "device"]
    device_ledger.take(
        "resident weights",
        sum(u.span_numel * u.dtype.itemsize for u in resident),
        remedy='Use weights="host", or a larger device_memory.',
    )
    _check_host(streamed, with_remainder, remainder, host_ledger)
    arenas = []  # that are not made yet
    for unit in units:
        if unit.weights_home == "host":
            # A GPU copies into pinned memory; what the host fills need not wait for it.
            later = source is not None and source.is_on_host and unit.packed is None
            arena = HostArena(
                _home_bytes(unit),
                purpose="weights",
                ledger=host_ledger,
                pin=pin and not later,
                touch=not later,
            )
            unit.host_weight = arena.span(unit.span_numel, unit.dtype)
            if later:
                arenas.append(arena)
        elif unit.weights_home == "device":
            unit.device_weight = _device_zeros(unit, options.device)
        if unit in with_remainder:
            assert remainder is not None
            # An arena for each: where the state's home is not the host, it goes when that is built.
            arena = HostArena(
                _remainder_bytes(unit, remainder),
                purpose=_remainder_purpose(unit),
                ledger=host_ledger,
                pin=pin,
            )
            unit.remainder = arena.span(unit.layout.trainable_numel, remainder.dtype)
    if on_disk:
        assert make_disk is not None
        most = options.state_format.max_piece_elements
        shapes = [
            DiskShape(numel=u.span_numel, dtype=u.dtype, piece_numel=u.piece_numel(most))
            for u in on_disk
        ]
        buffer_bytes = max(shape.piece_bytes for shape in shapes)
        disk = make_disk("weights", shapes, NUM_STAGED_WEIGHTS, buffer_bytes)
        for unit, tensor in zip(on_disk, disk.tensors, strict=True):
            unit.disk_weight, unit.host_weight = tensor, tensor.mapped
    replaced: Replaced = {}
    _wait_for(options.device)  # zeros: the threads of a source have streams of their own
    with made_ahead(arenas, pin=pin):
        for together in _turns(units):
            _move_in(together, source, replaced, options.device)
    _wait_for(options.device)
    return replaced


def _home_bytes(unit: Unit) -> int:
    return aligned_bytes(unit.span_numel, unit.dtype)


def _remainder_bytes(unit: Unit, remainder: StateTensor) -> int:
    return aligned_bytes(unit.layout.trainable_numel, remainder.dtype)


def _remainder_purpose(unit: Unit) -> str:
    return "optimizer state" if unit.state_home == "host" else MOVING_IN


def _check_host(
    streamed: list[Unit],
    with_remainder: list[Unit],
    remainder: StateTensor | None,
    ledger: Ledger,
) -> None:
    """Refuse what exceeds the budget before any of it is allocated."""
    wanted = Counter({"weights": sum(map(_home_bytes, streamed))})
    if remainder is not None:
        for unit in with_remainder:
            wanted[_remainder_purpose(unit)] += _remainder_bytes(unit, remainder)
    holds = [ledger.hold(purpose, size, remedy=OUT_OF_HOST) for purpose, size in wanted.items()]
    for hold in holds:
        hold.give_back()


def _device_zeros(unit: Unit, device: torch.device) -> Tensor:
    """Return a span in the device's memory, which its books have counted."""
    if device.type != "cpu":
        return torch.zeros(unit.span_numel, dtype=unit.dtype, device=device)
    # The system zeroes pages as they are filled, by several threads.
    books = Ledger("device", None)
    arena = HostArena(_home_bytes(unit), purpose="weights", ledger=books, pin=False, touch=False)
    return arena.span(unit.span_numel, unit.dtype)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _turns(units: list[Unit]) -> Iterator[list[Unit]]:
    """Return units that can be filled at the same time, in order.

    On the way to disk values pass through memory beside the homes: one unit at a time.
    """
    for on_disk, run in groupby(units, key=lambda unit: unit.disk_weight is not None):
        together = list(run)
        yield from ([unit] for unit in together) if on_disk else [together]


def _check_packable_values(units: list[Unit]) -> None:
    """Refuse values that cannot be packed while the model is still whole."""
    for unit in units:
        for field in unit.packed.fields if unit.packed is not None else ():
            try:
                check_range(unit.parameters[field.name])
            except ValueError as error:
                raise ValueError(f"{unit.full_name(field.name)}: {error}") from None


def _needs_remainder(unit: Unit, source: Source | None) -> bool:
    """Whether bf16 would round away some of the weights that the model comes with."""
    if unit.dtype != torch.bfloat16 or unit.layout.trainable_numel == 0:
        return False
    trainable = [unit.parameters[f.name] for f in unit.layout.trainable]
    if source is not None and any(p.is_meta for p in trainable):
        return source.is_wider_than_bf16(unit.part)
    return any(p.dtype != torch.bfloat16 for p in trainable)


def _move_in(
    units: list[Unit], source: Source | None, replaced: Replaced, device: torch.device
) -> None:
    """Copy the units' weights into their homes and let their parameters point there.

    Matrices are packed on ``device``.
    """
    arrivals = {id(unit.part): _Arrival(unit, device) for unit in units}
    for arrival in arrivals.values():
        if not arrival.on_meta:
            arrival.complete(replaced)
    wanted = [
        (arrival.unit.part, arrival.on_meta) for arrival in arrivals.values() if arrival.on_meta
    ]
    if wanted:
        assert source is not None
        for part in source.fill(wanted):
            arrivals[id(part)].complete(replaced)


class _Arrival:
    """A unit whose values are on their way to its home."""

    def __init__(self, unit: Unit, device: torch.device) -> None:
        self.unit = unit
        # Written to the mapped view, what is on its way to disk would pass through the page cache
        # and then have to be read again.
        on_disk = unit.disk_weight is not None
        self._passing = torch.zeros_like(unit.home) if on_disk else unit.home
        places = places_in(unit, self._passing, device)
        meta = {name for name, parameter in unit.parameters.items() if parameter.is_meta}
        self.on_meta = {name: place for name, place in places.items() if name in meta}
        self._others = {name: place for name, place in places.items() if name not in meta}

    def complete(self, replaced: Replaced) -> None:
        """Take the values that are not on meta too, and let all parameters point home."""
        views = self.unit.layout.separate(self.unit.home)
        for name, place in self._others.items():
            place.put(self.unit.parameters[name].data.reshape(-1), 0)
            self._point_home(name, views, replaced)
        for name in self.on_meta:
            self._point_home(name, views, replaced)
        if self.unit.disk_weight is not None:
            self.unit.disk_weight.write(self._passing)

    def _point_home(self, name: str, views: dict[str, Tensor], replaced: Replaced) -> None:
        parameter = self.unit.parameters[name]
        parameter.grad = None
        if name not in views:  # packed: its values are nowhere in their own type
            empty = torch.empty(parameter.shape, dtype=self.unit.dtype, device="meta")
            replace_parameter(self.unit, name, empty, replaced)
        elif parameter.is_meta:
            replace_parameter(self.unit, name, views[name], replaced)
        else:
            parameter.data = views[name]  # the object stays: whoever holds it sees the new home


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move every buffer (rotary tables, masks) to the device: they are small and always used."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def retie(model: nn.Module, replaced: Replaced) -> None:
    """Point tied names at the parameter objects that replaced meta ones."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                module._parameters[name] = replaced[id(parameter)][1]


def output_head(model: nn.Module) -> nn.Linear | None:
    """Return the plain linear layer that makes the logits, None if there is none."""
    head = end_module(model, "output")
    return head if type(head) is nn.Linear else None
