"""Gradients on their way from the backward to the optimizer.

Within a block they add up in fp32 on the device and leave once, in the *wire* type. Where they go
is a sink's business (gradient_sinks.py). A further backward adds to what is there by one rule in
every tier: previous (wire) + new in fp32, rounded to the wire type.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from outcore.kernels import accumulate_
from outcore.optim.gradient_sinks import GradientSink
from outcore.store.ledger import Ledger
from outcore.store.spans import Field
from outcore.stream.lanes import Fence
from outcore.stream.unit import Unit

_NORM_ELEMENTS = 1024  # in one fp32 sum


class Accumulator:
    """The fp32 sum of one unit's gradients over its micro-batches, on the device.

    ``flat`` must hold zeros between the fields of the layout; the fields themselves may hold
    anything, because the first micro-batch overwrites them. ``resting`` names parameters that are
    frozen now, though not when the model was offloaded: their gradients are dropped.
    """

    def __init__(self, unit: Unit, flat: Tensor) -> None:
        self.unit = unit
        self.flat = flat
        fields, parameters = unit.layout.trainable, unit.parameters
        self.resting = frozenset(f.name for f in fields if not parameters[f.name].requires_grad)
        self._fields = [(flat[f.offset : f.end].view(f.shape), f.name) for f in fields]
        self._is_empty = True

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients, in the order of layout.trainable; None is zero."""
        for (total, name), gradient in zip(self._fields, gradients, strict=True):
            if gradient is not None and name not in self.resting:
                accumulate_(total, gradient, is_first=self._is_empty)
            elif self._is_empty:
                total.zero_()
        self._is_empty = False

    def total(self) -> Tensor:
        """Return the sum; zero if nothing was added."""
        return self.flat.zero_() if self._is_empty else self.flat


class Gradients:
    """Collects the gradients of blocks (through accumulators) and edges, and their norms."""

    def __init__(
        self,
        units: Sequence[Unit],
        sink: GradientSink,
        *,
        device: torch.device,
        wire_dtype: torch.dtype,
        ledger: Ledger,
    ) -> None:
        self._sink = sink
        self._device = device
        self._wire_dtype = wire_dtype
        self._ledger = ledger
        numel = max((u.layout.trainable_numel for u in units if u.arrives_whole), default=0)
        self._ledger_bytes = numel * (4 + 2 * wire_dtype.itemsize)
        ledger.take(
            "gradient buffers",
            self._ledger_bytes,
            remedy="Use a larger device_memory, or freeze part of the model.",
        )
        self._sum = torch.zeros(numel, dtype=torch.float32, device=device)
        self._sum_layout: tuple[Field, ...] = ()
        self._wires = [torch.zeros(numel, dtype=wire_dtype, device=device) for _ in range(2)]
        self._wire_free: list[Fence | None] = [None, None]
        self._turn = 0
        self._resting: dict[int, frozenset[str]] = {}  # by unit
        self._are_used = False  # by a step, and not cleared since
        self._arrived: set[int] = set()  # blocks that have a gradient
        self._passed_by: dict[int, str] = {}  # names of blocks without one, by index
        self._has_warned = False
        # One squared norm for each block and for each parameter of an edge.
        self._norm_rows: dict[tuple[int, str], int] = {}
        for unit in units:
            for name in _norm_keys(unit):
                self._norm_rows[unit.index, name] = len(self._norm_rows)
        self._squared_norms = torch.zeros(len(self._norm_rows), dtype=torch.float64, device=device)

    def accumulator(self, unit: Unit) -> Accumulator:
        """Return the accumulator for the unit's backward; one is in use at a time."""
        flat = self._sum[: unit.layout.trainable_numel]
        if self._sum_layout != unit.layout.fields:
            flat.zero_()  # another layout has left its values between this one's fields
            self._sum_layout = unit.layout.fields
        return Accumulator(unit, flat)

    def finish(self, accumulator: Accumulator) -> None:
        """Send a block's summed gradient on its way."""
        unit, total = accumulator.unit, accumulator.total()
        self._arrived.add(unit.index)
        self._passed_by.pop(unit.index, None)
        earlier = self._sink.previous(unit, 0, total.numel())
        resting = accumulator.resting
        if earlier is not None:
            self._warn_if_used()
            total.add_(earlier)
            resting &= self.resting(unit.index)  # a gradient from before it was frozen counts
        self._resting[unit.index] = resting
        self._note_norm(unit, "", total)
        turn, self._turn = self._turn, 1 - self._turn
        free = self._wire_free[turn]
        if free is not None:
            free.before_compute()
        wire = self._wires[turn][: total.numel()]
        wire.copy_(total)
        ready = Fence.after_compute(self._device)
        self._wire_free[turn] = self._sink.deliver(unit, 0, wire, ready)

    def edge(self, unit: Unit, field: Field, gradient: Tensor) -> None:
        """Send the gradient of one parameter of an edge on its way."""
        wire = gradient.detach().to(self._wire_dtype).reshape(-1)
        earlier = self._sink.previous(unit, field.offset, field.numel)
        if earlier is not None:
            self._warn_if_used()
            wire = (wire.float() + earlier.float()).to(self._wire_dtype)
        self._note_norm(unit, field.name, wire)
        self._sink.deliver(unit, field.offset, wire, Fence.after_compute(self._device))

    def resting(self, unit_index: int) -> frozenset[str]:
        """Return the parameters of a block that its gradient has nothing for: they were frozen."""
        return self._resting.get(unit_index, frozenset())

    def squared_norms(self) -> dict[tuple[int, str], float]:
        """Return the squared norm of each gradient by (unit, parameter); waits for the device."""
        values = self._squared_norms.tolist()
        return {key: values[row] for key, row in self._norm_rows.items()}

    def used(self) -> None:
        """Say that a step has used what is here; it stays until it is cleared."""
        self._are_used = True

    def cleared(self) -> None:
        """Say that the sink has forgotten all gradients."""
        self._are_used = False
        self._arrived.clear()
        self._passed_by.clear()
        self._squared_norms.zero_()

    def passed_by(self, unit: Unit) -> None:
        """Say that a backward went through a block for what lies below, not for its weights."""
        if unit.index not in self._arrived:
            self._passed_by[unit.index] = unit.name

    def tell_passed_by(self) -> None:
        """In a step: warn of blocks that have no gradient though a backward went through them."""
        if self._passed_by:
            names = list(self._passed_by.values())
            self._passed_by.clear()
            warnings.warn(
                f"this step leaves out {names[0]} and {len(names) - 1} more: a backward went "
                "through them without a gradient for their parameters. backward(inputs=...) and "
                "torch.autograd.grad do not reach the parameters of streamed blocks: call "
                "backward() without inputs.",
                stacklevel=4,
            )

    def close(self) -> None:
        self._ledger.give_back("gradient buffers", self._ledger_bytes)
        self._ledger_bytes = 0

    def _warn_if_used(self) -> None:
        """Tell who clears gradients where they are not: in ``.grad``, which is always None."""
        if self._are_used and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "backward() adds to gradients that step() has used already, because nothing has "
                "cleared them since: call zero_grad() of the optimizer or of the offloaded model. "
                "zero_grad() of a module inside or around that model does not reach them, nor does "
                "p.grad = None.",
                stacklevel=2,
            )

    def _note_norm(self, unit: Unit, name: str, gradient: Tensor) -> None:
        self._squared_norms[self._norm_rows[unit.index, name]] = squared_norm(gradient)


def squared_norm(gradient: Tensor) -> Tensor:
    """Return the sum of squares in fp64, of fp32 sums of a thousand squares each.

    One fp32 sum over a block is 0.4% too small on a CPU: what is added last is less than half of
    the sum's last bit, and lost.
    """
    flat = gradient.reshape(-1)
    whole = flat.numel() // _NORM_ELEMENTS * _NORM_ELEMENTS
    rows = flat[:whole].view(-1, _NORM_ELEMENTS)
    parts = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    total: Tensor = parts.double().square().sum() + rest.double().square()
    return total


def _norm_keys(unit: Unit) -> list[str]:
    if unit.layout.trainable_numel == 0:
        return []
    return [""] if unit.arrives_whole else [f.name for f in unit.layout.trainable]
