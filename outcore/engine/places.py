"""Where the values of a parameter go: a span in a home, which takes them in runs of elements.

Runs may come in any order and from several threads at once. How a value is stored (cast, split into
a weight and its remainder, packed) does not depend on how the values were cut.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from outcore.kernels import split_master24, split_master_
from outcore.store.packed_spans import PackedField, PackedLayout
from outcore.stream.unit import Unit

# Held for work that takes all cores, or the GPU and memory there; kernels there are compiled at
# their first call.
_ALL_CORES = threading.Lock()


class Place(Protocol):
    @property
    def run_numel(self) -> int:
        """Runs begin and end at multiples of so many elements."""
        ...

    @property
    def memory(self) -> Tensor | None:
        """Memory of the host that takes values of its own type as they are, if it is no more."""
        ...

    def put(self, values: Tensor, first: int) -> None:
        """Store flat ``values``, of which the first is element ``first`` of the parameter.

        When it returns, ``values`` may be overwritten.
        """
        ...


def places_in(unit: Unit, home: Tensor, device: torch.device) -> dict[str, Place]:
    """Return the places of a unit's parameters in ``home``, which has the whole span.

    Matrices are packed on ``device``.
    """
    places: dict[str, Place] = {}
    for field in unit.layout.fields:
        flat = home[field.offset : field.end]
        if unit.remainder is not None and field.trainable:
            places[field.name] = _MasterPlace(flat, unit.remainder[field.offset : field.end])
        else:
            places[field.name] = _PlainPlace(flat)
    if unit.packed is not None:
        span = unit.packed_span(home)
        for packed in unit.packed.fields:
            places[packed.name] = _PackedPlace(unit.packed, packed, span, device)
    return places


class _PlainPlace:
    """Values in the home's own type."""

    run_numel = 1

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    @property
    def memory(self) -> Tensor | None:
        return self._flat if self._flat.device.type == "cpu" else None

    def put(self, values: Tensor, first: int) -> None:
        place = self._flat[first : first + values.numel()]
        is_here = place.device == values.device
        if values.dtype != place.dtype:
            with _ALL_CORES:
                if is_here:
                    place.copy_(values)
                    return
                # Where the values are: a cast between devices goes through pageable memory.
                values = values.to(place.dtype)
        if is_here and place.device.type == "cpu":
            _copy_with_one_core(place, values)
        else:
            place.copy_(values)


def _copy_with_one_core(place: Tensor, values: Tensor) -> None:
    """Copy flat values; torch would have every core help each of the threads that call this."""
    place.view(torch.uint8).numpy()[:] = values.contiguous().view(torch.uint8).numpy()


class _MasterPlace:
    """bf16 weights in one place, what they round away in another."""

    run_numel = 1
    memory = None

    def __init__(self, flat: Tensor, remainder: Tensor) -> None:
        self._flat = flat
        self._remainder = remainder

    def put(self, values: Tensor, first: int) -> None:
        with _ALL_CORES:
            self._split(values, first)

    def _split(self, values: Tensor, first: int) -> None:
        weight = self._flat[first : first + values.numel()]
        remainder = self._remainder[first : first + values.numel()]
        master = values.float().contiguous().to(weight.device)
        if remainder.dtype == torch.int8:
            weight24, remainder24 = split_master24(master)
            weight.copy_(weight24)
            remainder.copy_(remainder24)
            return
        there = remainder if remainder.device == weight.device else remainder.to(weight.device)
        split_master_(master, weight, there)
        if there is not remainder:
            remainder.copy_(there)


class _PackedPlace:
    """A matrix in 8 or 4 bit, whole rows at a time."""

    memory = None

    def __init__(
        self, layout: PackedLayout, field: PackedField, span: Tensor, device: torch.device
    ) -> None:
        self.run_numel = field.shape[-1]
        self._layout = layout
        self._field = field
        self._span = span
        self._device = device

    def put(self, values: Tensor, first: int) -> None:
        rows = values.view(-1, self.run_numel)
        with _ALL_CORES:
            self._layout.store(
                self._span, self._field, rows, self._device, first_row=first // self.run_numel
            )
