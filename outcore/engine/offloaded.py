"""The engine of one offloaded model: its units, streams and books, and what holds them together."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outcore.engine.device_limit import DeviceLimit
from outcore.engine.disk_tier import DiskTier
from outcore.engine.options import OffloadOptions
from outcore.engine.packed_parameters import check_not_written, packed_versions
from outcore.errors import OutcoreError
from outcore.optim.backend import OptimizerBackend, OptimizerPlacement
from outcore.optim.device_state import DEVICE_STATE
from outcore.passes.activations import ActivationPolicy
from outcore.passes.host_inputs import HostInputs
from outcore.passes.token_ranges import TokenRanges
from outcore.planning.plan import Plan
from outcore.store.allocator_slack import fillable_bytes
from outcore.store.heap import Heap
from outcore.store.ledger import Ledger, TierReport, tier_report
from outcore.stream.expansion import Expansion
from outcore.stream.lanes import Lane
from outcore.stream.slots import Slots
from outcore.stream.unit import Unit


class ForwardInThread(threading.local):
    """What is known of the forward that runs in the calling thread."""

    defers_logits = False
    suspects_ids = False  # some may be out of range


class Engine:
    """Owns everything that ``offload`` made for one model."""

    def __init__(
        self,
        units: list[Unit],
        options: OffloadOptions,
        *,
        host_ledger: Ledger,
        device_ledger: Ledger,
        device_limit: DeviceLimit | None,
        heap: Heap,
        slots: Slots,
        expansion: Expansion,
        copy_in: Lane,
        disk: DiskTier | None,
        plan: Plan | None,
    ) -> None:
        self.units = units
        self.options = options
        self.host_ledger = host_ledger
        self.device_ledger = device_ledger
        self._device_limit = device_limit
        self.heap = heap
        self.slots = slots
        self.expansion = expansion
        self.disk = disk
        self.plan = plan
        self._written = {unit.index: _versions(unit) for unit in units}  # as last seen
        self._packed_written = packed_versions(units)
        self._addresses = {unit.index: _addresses(unit) for unit in units}
        self._synchronized_updates = -1  # that were queued when last waited for
        self.called_edges: set[int] = set()  # units that a module's call has waited for
        self.block_lock = threading.RLock()  # see one_block_at_a_time.py
        self.forward = ForwardInThread()
        self.always_defers_logits = False  # also without gradients and labels
        self.token_ranges = TokenRanges(embedding=None, head=None)
        self.undo_patches: list[Callable[[], None]] = []
        num_blocks = sum(unit.part.is_block for unit in units)
        self.policy = ActivationPolicy(
            None
            if options.activations == "auto"
            else options.for_blocks("activations", num_blocks),
            num_blocks=num_blocks,
            spare_bytes=self.spare_device_bytes,
            planned_bytes=None if plan is None else plan.kept_block_bytes,
        )
        self.host_inputs = HostInputs(
            device=options.device, ledger=host_ledger, pin=options.device.type == "cuda"
        )
        self.backend = OptimizerBackend(
            units,
            OptimizerPlacement(
                state_format=options.state_format,
                wire_dtype=options.gradient_dtype,
                num_visits=options.num_visits,
                gradients_wait=None if plan is None else plan.job.gradients_wait,
            ),
            device=options.device,
            host_ledger=host_ledger,
            device_ledger=device_ledger,
            prefetch=slots.prefetch,
            spare_device_bytes=self.spare_device_bytes,
            wanted_device_bytes=self.policy.wanted_bytes,
            before_settling=self._note_peak,
            notice_writes=self.notice_writes,
            make_disk=disk.make if disk is not None else None,
        )
        # An input of every block that wants a gradient, so that autograd visits the block even
        # when only its weights are trained.
        self.anchor: Tensor = torch.zeros((), device=options.device, requires_grad=True)
        self._copy_in = copy_in
        self._peak_before_state = 0  # of the device, before optimizer state came to stay there
        self._is_closed = False
        _open_engines.add(self)

    def unit_of(self, parameter: Tensor) -> Unit:
        return next(u for u in self.units if any(p is parameter for p in u.parameters.values()))

    @property
    def device(self) -> torch.device:
        return self.options.device

    def spare_device_bytes(self) -> int:
        """Return what the budget leaves after the highest use so far."""
        budget = self.device_ledger.budget_bytes
        if budget is None:
            return 0
        used = self.device_peak_bytes()
        if self.device.type == "cuda":
            # State comes to the device after the first step, whose peak does not hold it.
            state = sum(self.device_ledger.peaks().get(purpose, 0) for purpose in DEVICE_STATE)
            used = max(used, self._peak_before_state + state)
        else:
            # The CPU device's books have no temporaries: leave room for one block's graph.
            used += max(self.policy.largest_bytes(), 1)
            memory = self.device_ledger.within
            if memory is not None and memory.budget_bytes is not None:  # some of it is the host's
                of_others = memory.peak_bytes - self.device_ledger.peak_bytes
                budget = min(budget, memory.budget_bytes - of_others)
        return max(0, fillable_bytes(budget, is_gpu=self.device.type == "cuda") - used)

    def _note_peak(self) -> None:
        self._peak_before_state = self.device_peak_bytes()

    def device_peak_bytes(self) -> int:
        """Return the most device memory that was in use at a time."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self.device_ledger.peak_bytes

    def report(self) -> list[TierReport]:
        """Return where everything lives, tier by tier."""
        return [
            replace(tier_report(self.device_ledger), peak_bytes=self.device_peak_bytes()),
            tier_report(self.host_ledger),
            *([tier_report(self.disk.ledger)] if self.disk is not None else []),
        ]

    def synchronize(self) -> None:
        """Wait until every queued update is done, so that parameters can be read."""
        num_updates = self._num_updates()
        self.backend.synchronize()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._synchronized_updates = num_updates
        if self.disk is not None:
            self.disk.check_uncut()

    def synchronize_if_updated(self) -> None:
        """As ``synchronize``, for callers by the thousand: only if there were updates since."""
        if self._synchronized_updates != self._num_updates():
            self.synchronize()
        elif self.disk is not None:
            self.disk.check_uncut()

    def check_weights_on_disk(self, units: Sequence[Unit]) -> None:
        """Raise StoreError unless parameters on disk show what they were last given.

        Reads all of them; call ``synchronize`` before.
        """
        on_disk = [unit for unit in units if unit.disk_weight is not None]
        self.notice_writes(on_disk)  # by users, which are no harm
        for unit in on_disk:
            assert unit.disk_weight is not None
            unit.disk_weight.check()

    def check_failed_weights(self) -> None:
        """``check_weights_on_disk`` where a forward or a backward found what it could not use.

        Once it can be used, by a second reading or because it was written anew, it is forgotten.
        """
        failed = list(self.slots.failed)
        self.check_weights_on_disk(failed)
        self.slots.failed.difference_update(failed)

    def _num_updates(self) -> int:
        return sum(unit.version for unit in self.units)

    def notice_writes(self, units: Sequence[Unit] | None = None) -> None:
        """Before a forward: see which parameters were written in place, and follow them."""
        units = self.units if units is None else units
        for unit in units:
            if self._addresses[unit.index] != _addresses(unit):
                _refuse_other_memory(unit)
        changed = [unit for unit in units if self._written[unit.index] != _versions(unit)]
        if changed:
            check_not_written(changed, self._packed_written)
            self.synchronize()
            self.weights_replaced(changed, by_torch=True)

    def weights_replaced(
        self, units: Sequence[Unit] | None = None, *, by_torch: bool = False
    ) -> None:
        """Say that parameters were written from outside, after ``synchronize``.

        by_torch: whether torch has counted the writes, so that it is known which are not written.
        """
        units = self.units if units is None else units
        for unit in units:
            versions = _versions(unit)
            unit.update_queued([])
            for field in unit.layout.trainable if unit.remainder is not None else ():
                if by_torch and self._written[unit.index][field.name] == versions[field.name]:
                    continue  # it keeps its master
                assert unit.remainder is not None
                unit.remainder[field.offset : field.end].zero_()  # the master is what was written
            state = self.backend.states.get(unit.index)
            if state is not None and unit.device_weight is not None:
                state.weight.copy_(unit.device_weight[: state.weight.numel()])
            self._written[unit.index] = versions  # writes to other units are still to be noticed
        self.backend.weights_replaced(units)
        self._packed_written.update(packed_versions(units))

    def close(self) -> None:
        """End every background thread. Parameters stay readable where they are."""
        if getattr(self, "_is_closed", True):
            return
        self._is_closed = True
        try:
            self.backend.close()
            self.host_inputs.close()
            self._copy_in.close()
            if self.disk is not None:
                self.disk.close()
        finally:  # Ctrl-C in the wait for a thread: nobody comes here a second time
            if self._device_limit is not None:
                self._device_limit.lift()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an offloaded model cannot be copied or pickled: use save_pretrained or state_dict(), "
            "or call outcore.release(model) first"
        )

    def __del__(self) -> None:
        self.close()


def _refuse_other_memory(unit: Unit) -> None:
    """Refuse parameters that were given other memory: their home would not see what is in it.

    Its values are not taken over: who swaps weights this way keeps the home's as the others, and
    would find them overwritten.
    """
    homes = unit.layout.views(unit.home)
    for name, home in homes.items():
        if home.numel() and unit.parameters[name].data_ptr() != home.data_ptr():
            raise OutcoreError(
                f"{unit.full_name(name)} was given other memory (parameter.data = ..., "
                "vector_to_parameters), which an offloaded model would not train. Write the "
                "values in place, with torch.no_grad(): parameter.copy_(values), or call "
                "outcore.release(model) first"
            )


def _addresses(unit: Unit) -> list[int]:
    return [parameter.data_ptr() for parameter in unit.parameters.values()]


def _versions(unit: Unit) -> dict[str, int]:
    """Return how often torch has counted a write to each of the unit's parameters."""
    return {name: parameter._version for name, parameter in unit.parameters.items()}


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()
