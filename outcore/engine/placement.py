"""Moving a model's parameters into their homes, one unit at a time.

Everything that can be refused is refused before the first parameter is touched.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from outcore.blocks import Part, end_module, find_parts, runs_as_block
from outcore.engine.options import OffloadOptions
from outcore.engine.packed_parameters import Replaced, replace_parameter
from outcore.errors import UnsupportedModel
from outcore.kernels import split_master24, split_master_
from outcore.kernels.packed_format import PackedFormat, check_range
from outcore.optim.backend import MakeDisk
from outcore.optim.disk_updater import num_weight_buffers
from outcore.optim.updates import MAX_PIECE_ELEMENTS
from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.store.ledger import Ledger
from outcore.store.packed_spans import PackedLayout, is_packable
from outcore.store.spans import SpanLayout
from outcore.stream.disk_tensors import DiskShape
from outcore.stream.unit import Unit


class Source(Protocol):
    """Gives the values of parts whose parameters are on the meta device."""

    def values(self, part: Part) -> dict[str, Tensor]: ...

    def is_wider_than_bf16(self, part: Part) -> bool: ...


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
            f'frozen_weights="{options.frozen_weights.name}", but no block has a frozen matrix: '
            "add adapters or freeze the base (requires_grad_(False)) first"
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
    arena = remainders = None
    if streamed:
        total = sum(aligned_bytes(u.span_numel, u.dtype) for u in streamed)
        arena = HostArena(total, purpose="weights", ledger=host_ledger, pin=pin)
    if remainder is not None and with_remainder:
        total = sum(
            aligned_bytes(u.layout.trainable_numel, remainder.dtype) for u in with_remainder
        )
        remainders = HostArena(total, purpose="optimizer state", ledger=host_ledger, pin=pin)
    for unit in units:
        if unit in streamed:
            assert arena is not None
            unit.host_weight = arena.span(unit.span_numel, unit.dtype)
        elif unit.weights_home == "device":
            unit.device_weight = torch.zeros(
                unit.span_numel, dtype=unit.dtype, device=options.device
            )
        if unit in with_remainder:
            assert remainder is not None
            assert remainders is not None
            unit.remainder = remainders.span(unit.layout.trainable_numel, remainder.dtype)
    if on_disk:
        assert make_disk is not None
        shapes = [
            DiskShape(
                numel=u.span_numel, dtype=u.dtype, piece_numel=u.piece_numel(MAX_PIECE_ELEMENTS)
            )
            for u in on_disk
        ]
        disk = make_disk("weights", shapes, num_weight_buffers())
        for unit, tensor in zip(on_disk, disk.tensors, strict=True):
            unit.disk_weight, unit.host_weight = tensor, tensor.mapped
    replaced: Replaced = {}
    for unit in units:
        loaded = source.values(unit.part) if source is not None else {}
        _move_in(unit, loaded, replaced, options.device)
    return replaced


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
    unit: Unit, loaded: dict[str, Tensor], replaced: Replaced, device: torch.device
) -> None:
    """Copy the unit's weights into its home and let its parameters point there.

    ``loaded`` has the values of parameters that are on meta. Matrices are packed on ``device``.
    """
    home = unit.home
    views = unit.layout.separate(home)
    # On the way to disk values pass through memory: written to the mapped view, they would pass
    # through the page cache and then have to be read again.
    passing = torch.zeros_like(home) if unit.disk_weight is not None else home
    places = unit.layout.separate(passing)
    for field in unit.layout.fields:
        parameter = unit.parameters[field.name]
        values = _values(unit, field.name, loaded)
        place = places[field.name]
        if unit.remainder is not None and field.trainable:
            master = values.float().reshape(-1).contiguous().to(place.device)
            remainder = unit.remainder[field.offset : field.end]
            split_into = (
                remainder.to(place.device) if place.device != remainder.device else remainder
            )
            if remainder.dtype == torch.int8:
                weight24, remainder24 = split_master24(master)
                place.view(-1).copy_(weight24)
                split_into.copy_(remainder24)
            else:
                split_master_(master, place.view(-1), split_into)
            remainder.copy_(split_into)
        else:
            # Cast where the values are: a cast on the way between devices goes through pageable
            # memory.
            place.copy_(values.to(place.dtype))
        parameter.grad = None
        view = views[field.name]
        if not parameter.is_meta:
            parameter.data = view  # the object stays: whoever holds it sees the new home
            continue
        replace_parameter(unit, field.name, view, replaced)
    if unit.packed is not None:
        span = unit.packed_span(passing)
        for packed in unit.packed.fields:
            values = _values(unit, packed.name, loaded)
            unit.packed.store(span, packed, values, device)
            del values
            loaded.pop(packed.name, None)
            empty = torch.empty(packed.shape, dtype=unit.dtype, device="meta")
            replace_parameter(unit, packed.name, empty, replaced)
    if unit.disk_weight is not None:
        unit.disk_weight.write(passing)


def _values(unit: Unit, name: str, loaded: dict[str, Tensor]) -> Tensor:
    parameter = unit.parameters[name]
    values = loaded[name] if parameter.is_meta else parameter.data
    if values.shape != parameter.shape:
        raise ValueError(
            f"{unit.full_name(name)} has shape {tuple(values.shape)} in the checkpoint and "
            f"{tuple(parameter.shape)} in the model"
        )
    return values


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
