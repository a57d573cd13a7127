"""Snapshots: a copy in host memory of all that a checkpoint holds, made while training goes on.

Each unit is copied as soon as the update that ``step()`` queued for it is done, and its next update
waits for the copy. The memory is taken once, exactly as much as the state has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outcore.checkpoint.contents import (
    BUFFERS,
    Named,
    persistent_buffers,
    trained_units,
    unit_file,
    unit_tensors,
)
from outcore.engine.offload import engine_of
from outcore.optim.adamw import AdamW
from outcore.optim.state import UnitState
from outcore.planning.plan import CHECKPOINT_STAGING
from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.stream.disk_lanes import wait_over
from outcore.stream.lanes import Fence, Lane
from outcore.stream.unit import Unit


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """The tensors of one file; they are true behind the fences."""

    name: str
    tensors: Named
    after: Sequence[Fence]


class Snapshots:
    """Memory for one snapshot at a time, and the lanes that fill it."""

    def __init__(self, model: nn.Module, optimizer: AdamW) -> None:
        """Take the memory; OutOfBudget if the host has not enough."""
        engine = engine_of(model)
        self._model = model
        self._optimizer = optimizer
        self._backend = engine.backend
        self._units = trained_units(model)
        states = [self._backend.states[unit.index] for unit in self._units]
        # By name, and looked up once: a state_dict tells which are persistent, and waits for all
        # updates.
        buffers = dict(persistent_buffers(model))
        arena = HostArena(
            sum(_staging_bytes(state.tensors()) for state in states)
            + _staging_bytes(list(buffers.values())),
            purpose=CHECKPOINT_STAGING,
            ledger=engine.host_ledger,
            pin=engine.device.type == "cuda",
        )
        self._copies = [_like(state, arena) for state in states]
        self._buffers = {
            name: arena.span(b.numel(), b.dtype).view(b.shape) for name, b in buffers.items()
        }
        self._device = engine.device
        # Copies of host memory wait in a thread, copies of the device's on a stream: a lane with a
        # stream would start a host copy before the work ahead of it is done.
        self._from_host = Lane("checkpoint-from-host")
        self._from_device = Lane("checkpoint-from-device", engine.device, hardware="to host")

    def take(self) -> list[StagedFile]:
        """Start to copy the state after the last ``step()``; return the files it will fill."""
        files = []
        for unit, copy in zip(self._units, self._copies, strict=True):
            tensors = unit_tensors(unit, copy, self._optimizer)
            after = self._copy_unit(unit, copy)
            files.append(StagedFile(name=unit_file(unit), tensors=tensors, after=after))
        if self._buffers:
            files.append(self._copy_buffers())
        return files

    def close(self) -> None:
        # A checkpoint that failed may have copies left, and updates wait for these: dropped, they
        # would fail with them.
        wait_over([lane.submit(_nothing) for lane in (self._from_host, self._from_device)])
        self._from_host.close()
        self._from_device.close()

    def _copy_unit(self, unit: Unit, copy: UnitState) -> list[Fence]:
        submitted: list[Fence] = []

        def read(state: UnitState, after: list[Fence]) -> list[Fence]:
            for target, source in zip(copy.tensors(), state.tensors(), strict=True):
                lane = self._from_device if source.is_cuda else self._from_host
                submitted.append(
                    lane.submit(_copying(target, source), after=after, label=f"copy {unit.name}")
                )
            return submitted

        self._backend.read_state(unit, read)
        return submitted

    def _copy_buffers(self) -> StagedFile:
        """Copy buffers in the order of the compute stream: the next forward may change them."""
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, copy in self._buffers.items():
                copy.copy_(buffers[name], non_blocking=True)
        named = list(self._buffers.items())
        return StagedFile(name=BUFFERS, tensors=named, after=[Fence.after_compute(self._device)])


def _staging_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(aligned_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)


def _like(state: UnitState, arena: HostArena) -> UnitState:
    weight, *rest = (arena.span(tensor.numel(), tensor.dtype) for tensor in state.tensors())
    return UnitState(format=state.format, weight=weight, rest=tuple(rest))


def _copying(target: Tensor, source: Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy


def _nothing() -> None:
    pass
