"""Moving a model's parameters into their homes, one unit at a time.

Everything that can be refused is refused before the first parameter is touched.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from outcore.blocks import Part, end_module, find_parts, runs_as_block
from outcore.engine.options import OffloadOptions
from outcore.errors import UnsupportedModel
from outcore.kernels import split_master24, split_master_
from outcore.optim.backend import MakeDisk
from outcore.optim.disk_updater import num_weight_buffers
from outcore.optim.updates import MAX_PIECE_ELEMENTS
from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.store.ledger import Ledger
from outcore.store.spans import SpanLayout
from outcore.stream.disk_tensors import DiskShape
from outcore.stream.unit import Unit


class Source(Protocol):
    """Gives the values of parts whose parameters are on the meta device."""

    def values(self, part: Part) -> dict[str, Tensor]: ...

    def is_wider_than_bf16(self, part: Part) -> bool: ...


Replaced = dict[int, tuple[nn.Parameter, nn.Parameter]]  # by id: a meta parameter and the real one
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
        units.append(
            Unit(
                index=len(units),
                part=part,
                arrives_whole=part.is_block or runs_as_block(part, ends),
                layout=SpanLayout.of(part.parameters),
                dtype=options.dtype,
                first_element=first_element,
                is_urgent=not any(unit.part.is_block for unit in units),
                weights_home="device",
                state_home=options.edge_state,
            )
        )
        first_element += units[-1].layout.trainable_numel
    blocks = [unit for unit in units if unit.part.is_block]
    homes = (options.for_blocks(name, len(blocks)) for name in ("weights", "state"))
    for unit, weights, state in zip(blocks, *homes, strict=True):
        unit.weights_home, unit.state_home = weights, state
    if options.activations != "auto":
        options.for_blocks("activations", len(blocks))  # refuses a list of another length
    return units


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
    streamed = [u for u in units if u.weights_home == "host"]
    on_disk = [u for u in units if u.weights_home == "disk"]
    remainder = options.state_format.remainder
    with_remainder = [u for u in units if _needs_remainder(u, source)] if remainder else []
    pin = options.device.type == "cuda"
    resident = [u for u in units if u.weights_home == "device"]
    device_ledger.take(
        "resident weights",
        sum(u.layout.numel * u.dtype.itemsize for u in resident),
        remedy='Use weights="host", or a larger device_memory.',
    )
    arena = remainders = None
    if streamed:
        total = sum(aligned_bytes(u.layout.numel, u.dtype) for u in streamed)
        arena = HostArena(total, purpose="weights", ledger=host_ledger, pin=pin)
    if remainder is not None and with_remainder:
        total = sum(
            aligned_bytes(u.layout.trainable_numel, remainder.dtype) for u in with_remainder
        )
        remainders = HostArena(total, purpose="optimizer state", ledger=host_ledger, pin=pin)
    for unit in units:
        if unit in streamed:
            assert arena is not None
            unit.host_weight = arena.span(unit.layout.numel, unit.dtype)
        elif unit.weights_home == "device":
            unit.device_weight = torch.zeros(
                unit.layout.numel, dtype=unit.dtype, device=options.device
            )
        if unit in with_remainder:
            assert remainder is not None
            assert remainders is not None
            unit.remainder = remainders.span(unit.layout.trainable_numel, remainder.dtype)
    if on_disk:
        assert make_disk is not None
        shapes = [
            DiskShape(
                numel=u.layout.numel, dtype=u.dtype, piece_numel=u.piece_numel(MAX_PIECE_ELEMENTS)
            )
            for u in on_disk
        ]
        disk = make_disk("weights", shapes, num_weight_buffers())
        for unit, tensor in zip(on_disk, disk.tensors, strict=True):
            unit.disk_weight, unit.host_weight = tensor, tensor.mapped
    replaced: Replaced = {}
    for unit in units:
        _move_in(unit, source.values(unit.part) if source is not None else None, replaced)
    return replaced


def _needs_remainder(unit: Unit, source: Source | None) -> bool:
    """Whether bf16 would round away some of the weights that the model comes with."""
    if unit.dtype != torch.bfloat16 or unit.layout.trainable_numel == 0:
        return False
    if source is not None:
        return source.is_wider_than_bf16(unit.part)
    trainable = [unit.parameters[f.name] for f in unit.layout.trainable]
    return any(p.dtype != torch.bfloat16 for p in trainable)


def _move_in(unit: Unit, loaded: dict[str, Tensor] | None, replaced: Replaced) -> None:
    """Copy the unit's weights into its home and let its parameters point there."""
    home = unit.host_weight if unit.host_weight is not None else unit.device_weight
    assert home is not None
    views = unit.layout.separate(home)
    # On the way to disk values pass through memory: written to the mapped view, they would pass
    # through the page cache and then have to be read again.
    passing = torch.zeros_like(home) if unit.disk_weight is not None else home
    places = unit.layout.separate(passing)
    for field in unit.layout.fields:
        parameter = unit.parameters[field.name]
        values = loaded[field.name] if loaded is not None else parameter.data
        if values.shape != field.shape:
            raise ValueError(
                f"{unit.full_name(field.name)} has shape {tuple(values.shape)} in the checkpoint "
                f"and {tuple(field.shape)} in the model"
            )
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
        owner, leaf = _owner(unit.part.module, field.name)
        real = nn.Parameter(view, requires_grad=parameter.requires_grad)
        owner._parameters[leaf] = unit.parameters[field.name] = real
        replaced[id(parameter)] = parameter, real
    if unit.disk_weight is not None:
        unit.disk_weight.write(passing)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


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
