"""Slots: a few spans of device memory that the weights of all streamed blocks pass through.

The loop of a block's pass is: *fetch the next, wait for this, run, release*. Contents are tagged
with the version of the weights, so that an update makes every older copy worthless by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.store.ledger import Ledger
from outcore.stream.disk_tensors import copy_from_disk
from outcore.stream.lanes import Fence, Lane
from outcore.stream.order import LearnedOrder, Use
from outcore.stream.unit import Unit
from outcore.units import format_bytes


@dataclass(kw_only=True)
class _Slot:
    memory: Tensor
    block: int | None = None
    version: int = -1
    ready: Fence | None = None  # the copy into the slot
    free: Fence | None = None  # the last compute that read the slot
    users: int = 0


class Slots:
    """Streams host weights into device slots, ahead of use, in the learned order."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        copy_in: Lane,
        ledger: Ledger,
    ) -> None:
        self._units = {unit.index: unit for unit in units}
        self._device = device
        self._copy_in = copy_in
        self._order = LearnedOrder()
        self._lock = threading.RLock()
        numel = max((unit.span_numel for unit in units), default=0)
        num_slots = num_slots if units else 0
        self._ledger_bytes = num_slots * numel * dtype.itemsize
        self._ledger = ledger
        ledger.take(
            "weight slots",
            self._ledger_bytes,
            remedy=(
                f"Each of the {num_slots} slots holds the largest block, "
                f"{format_bytes(numel * dtype.itemsize)}: use fewer (num_slots=1 is the least) or "
                "a larger device_memory."
            ),
        )
        self._slots = [
            _Slot(memory=torch.empty(numel, dtype=dtype, device=device)) for _ in range(num_slots)
        ]
        # Their memory may still be in use under its last owner, on the compute stream.
        allocated = Fence.after_compute(device)
        for slot in self._slots:
            slot.free = allocated
        self.failed: set[Unit] = set()  # whose weights could not be had when they were needed
        self.num_fetches = 0
        self.num_misses = 0  # fetches that were asked for only when needed

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def acquire(self, unit: Unit, phase: str) -> Tensor:
        """Return the unit's weights on the device, ready for what is launched next."""
        if unit.device_weight is not None:
            unit.before_compute()
            return unit.device_weight
        with self._lock:
            self._order.observe(Use(phase, unit.index))
            slot = self._find(unit.index)
            if slot is None:
                self.num_misses += 1
                slot = self._fetch(unit.index, self._victim(()))
            slot.users += 1
        try:
            self.prefetch(phase)
            assert slot.ready is not None
            slot.ready.before_compute()
        except BaseException:  # a failed copy, or Ctrl-C in the wait: nobody will release it
            with self._lock:
                slot.users -= 1
                if slot.ready is not None and slot.ready.error is not None:
                    slot.block = None
                    self.failed.add(unit)
            raise
        return slot.memory[: unit.span_numel]

    def release(self, unit: Unit) -> None:
        """Say that all work on the unit's weights has been launched."""
        if unit.device_weight is not None:
            return
        with self._lock:
            slot = next(s for s in self._slots if s.block == unit.index and s.users)
            slot.users -= 1
            slot.free = Fence.after_compute(self._device)

    def prefetch(self, phase: str | None = None) -> None:
        """Fetch the uses expected next into slots that nothing nearer needs.

        Within a pass in ``phase``, a forward that follows a backward is not fetched ahead: the
        optimizer step between them will change the weights. After a step, ``phase`` is None.
        """
        with self._lock:
            wanted: list[int] = []
            for use in self._order.upcoming(len(self._slots)):
                if phase == "backward" and use.phase != "backward":
                    break
                if use.block in wanted:
                    continue
                if self._find(use.block) is None:
                    slot = self._victim(wanted)
                    if slot is None:
                        break
                    self._fetch(use.block, slot)
                wanted.append(use.block)

    def close(self) -> None:
        self._slots.clear()
        self._ledger.give_back("weight slots", self._ledger_bytes)
        self._ledger_bytes = 0

    def _find(self, block: int) -> _Slot | None:
        version = self._units[block].version
        return next((s for s in self._slots if s.block == block and s.version == version), None)

    def _victim(self, wanted: list[int] | tuple[int, ...]) -> _Slot | None:
        """Return an unused slot whose contents are needed last, None if all are needed sooner."""
        idle = [s for s in self._slots if s.users == 0]
        for slot in idle:
            if slot.block is None or slot.version != self._units[slot.block].version:
                return slot
        spare = [s for s in idle if s.block not in wanted]
        nearest = [use.block for use in self._order.upcoming(2 * len(self._slots))]
        spare.sort(key=lambda s: nearest.index(s.block) if s.block in nearest else len(nearest))
        return spare[-1] if spare else None

    def _fetch(self, block: int, slot: _Slot | None) -> _Slot:
        if slot is None:
            raise AssertionError("every slot is in use: a block was acquired inside another block")
        unit = self._units[block]
        home, target = unit.host_weight, slot.memory[: unit.span_numel]
        assert home is not None

        def copy() -> None:
            if unit.disk_weight is not None:
                copy_from_disk(unit.disk_weight, target, self._device)
            else:
                target.copy_(home, non_blocking=True)

        # The version first: an update that another thread queues meanwhile makes the copy stale.
        slot.block, slot.version = block, unit.version
        # The copy waits for the updates of its source and for the last reader of its target. An
        # abandoned copy into the same slot cannot land after it: a lane keeps its order.
        after = [*unit.pending, *([slot.free] if slot.free else [])]
        slot.ready = self._copy_in.submit(copy, after=after, label=f"weights {unit.name}")
        self.num_fetches += 1
        return slot
