"""What an optimizer works with: the state's homes, the gradients' ways, and who waits for whom.

``offload`` makes one backend for each model; ``AdamW`` starts it, because only then is it known
which parameters are trained and whether gradients have to wait for clipping.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outcore.errors import OutcoreError
from outcore.optim.device_state import DeviceRoom
from outcore.optim.disk_updater import NUM_STAGED
from outcore.optim.gradient_sinks import PassingSink, WaitingSink
from outcore.optim.gradients import Gradients
from outcore.optim.state import (
    UnitState,
    build_on_device,
    build_on_disk,
    build_on_host,
    disk_shapes,
)
from outcore.optim.state_format import StateFormat
from outcore.optim.state_readers import StateReaders
from outcore.optim.updaters import Updaters
from outcore.optim.updates import Chunk, ChunkUpdate, chunks_of
from outcore.store.ledger import Ledger
from outcore.stream.disk_tensors import DiskShape, DiskTensors
from outcore.stream.lanes import Fence, Lane
from outcore.stream.unit import Unit

MAX_CHUNK_ELEMENTS = 1 << 25
BUILT_ON_DEVICE = ("optimizer state", "gradients", "gradient buffers")  # and there to stay


@dataclass(frozen=True, kw_only=True)
class OptimizerPlacement:
    """How state is kept, how gradients travel, and how much may be updated on the device."""

    state_format: StateFormat
    wire_dtype: torch.dtype
    num_visits: int | None  # chunks with buffers on the device; None: as many as help and fit
    gradients_wait: bool | None = None  # what a plan was made for; None: there is none


MakeDisk = Callable[[str, Sequence[DiskShape], int, int], DiskTensors]
"""(name, shapes, number of staging buffers) → the tensors of a new scratch file."""


class OptimizerBackend:
    """State, gradients and updates of one offloaded model."""

    def __init__(
        self,
        units: Sequence[Unit],
        placement: OptimizerPlacement,
        *,
        device: torch.device,
        host_ledger: Ledger,
        device_ledger: Ledger,
        prefetch: Callable[[], None],
        spare_device_bytes: Callable[[], int],
        wanted_device_bytes: Callable[[], int] = lambda: 0,
        before_settling: Callable[[], None] = lambda: None,
        notice_writes: Callable[[], None] = lambda: None,
        make_disk: MakeDisk | None = None,
    ) -> None:
        """``make_disk`` makes the tensors of a scratch file, where there is a disk tier.

        Of the spare bytes of the device, others want ``wanted_device_bytes``; ``before_settling``
        is called before state takes any of them. ``notice_writes`` takes over what users have
        written to parameters.
        """
        self.all_units = list(units)
        self.units = [unit for unit in units if unit.layout.trainable_numel]
        self.states: dict[int, UnitState] = {}
        self.gradients: Gradients | None = None
        self._placement = placement
        self._device = device
        self._host_ledger = host_ledger
        self._device_ledger = device_ledger
        self._prefetch = prefetch
        self._room = DeviceRoom(
            ledger=device_ledger,
            spare_bytes=spare_device_bytes,
            wanted_bytes=wanted_device_bytes,
            before_settling=before_settling,
        )
        self.notice_writes = notice_writes
        self._make_disk = make_disk
        self._pin = device.type == "cuda"
        self._waiting: WaitingSink | None = None
        self._passing: PassingSink | None = None
        self._updaters: Updaters | None = None
        self._lanes: list[Lane] = []
        self._disk: DiskTensors | None = None
        self._checks: Lane | None = None
        self._readers = StateReaders()
        self._has_loaded_masters = False  # their lower bits, and no update was queued since
        largest = max((unit.layout.trainable_numel for unit in self.units), default=1)
        # Small models get several chunks too: the machinery is the same at every size.
        self.chunks = chunks_of(
            self.units,
            min(MAX_CHUNK_ELEMENTS, max(1 << 10, largest // 3)),
            placement.state_format.max_piece_elements,
        )

    @property
    def plans_waiting(self) -> bool | None:
        """Whether the plan lets gradients wait for the whole backward; None without a plan."""
        return self._placement.gradients_wait

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients, where they wait."""
        elements = sum(unit.layout.trainable_numel for unit in self.units)
        return elements * self._placement.wire_dtype.itemsize

    def start(
        self,
        *,
        passing: Callable[..., None] | None,
        check: Callable[[Chunk], None],
    ) -> None:
        """Allocate state and gradient homes.

        ``passing`` takes updates during the backward; ``check`` refuses a second one of a chunk.
        """
        if self.states:
            raise OutcoreError(
                "this model already has an outcore.AdamW; its state would be built a second time. "
                "Use the first one, or call outcore.release(model) and offload it anew."
            )
        taken = self._device_ledger.taken()
        try:
            self._build(passing, check)
        except BaseException:
            for purpose, num_bytes in self._device_ledger.taken().items():
                if purpose in BUILT_ON_DEVICE:
                    self._device_ledger.give_back(purpose, num_bytes - taken.get(purpose, 0))
            if self._disk is not None:
                for unit in self.units:  # a next try finds what bf16 rounded away in memory
                    if unit.state_home == "disk" and unit.remainder is not None:
                        unit.remainder = unit.remainder.clone()
                self._disk.close()
                self._disk = None
            for lane in self._lanes:
                lane.close()
            self.states, self._lanes = {}, []
            self._waiting = self._passing = None
            raise

    def _build(
        self,
        passing: Callable[..., None] | None,
        check: Callable[[Chunk], None],
    ) -> None:
        format = self._placement.state_format
        on_device = [unit for unit in self.units if unit.state_home == "device"]
        on_host = [unit for unit in self.units if unit.state_home == "host"]
        on_disk = [unit for unit in self.units if unit.state_home == "disk"]
        built = build_on_device(on_device, format, device=self._device, ledger=self._device_ledger)
        if on_disk:
            assert self._make_disk is not None
            of_units = [disk_shapes(unit, format) for unit in on_disk]
            self._disk = self._make_disk(
                "state",
                [shape for shapes in of_units for shape in shapes],
                NUM_STAGED,
                max(sum(shape.piece_bytes for shape in shapes) for shapes in of_units),
            )
            built.update(build_on_disk(on_disk, format, self._disk))
        # After the others, which have taken what came to the host on its way to them.
        built.update(build_on_host(on_host, format, ledger=self._host_ledger, pin=self._pin))
        self.states = {unit.index: built[unit.index] for unit in self.units}
        copy_out = Lane("copy-out", self._device, hardware="to host")
        copy_back = Lane("copy-back", self._device, hardware="to device")
        refresh = Lane("refresh", self._device, hardware="to device")
        self._lanes = [copy_out, copy_back, refresh]
        wire_dtype = self._placement.wire_dtype
        if passing is not None:
            sink: WaitingSink | PassingSink
            sink = self._passing = PassingSink(
                self.chunks,
                wire_dtype=wire_dtype,
                copy_out=copy_out,
                host_ledger=self._host_ledger,
                pin=self._pin,
                submit=passing,
                check=check,
                direct=self._direct_gradient,
                device=self._device,
            )
        else:
            sink = self._waiting = WaitingSink(
                self.units,
                self.chunks,
                direct=self._direct_gradient,
                device=self._device,
                wire_dtype=wire_dtype,
                copy_out=copy_out,
                copy_back=copy_back,
                host_ledger=self._host_ledger,
                device_ledger=self._device_ledger,
                pin=self._pin,
            )
        self.gradients = Gradients(
            self.units,
            sink,
            device=self._device,
            wire_dtype=wire_dtype,
            ledger=self._device_ledger,
        )
        if any(unit.is_on_disk for unit in self.units):
            self._checks = Lane("disk-checks", hardware="disk read")
            self._lanes.append(self._checks)
        self._updaters = Updaters(
            self.chunks,
            self.states,
            device=self._device,
            gradient_dtype=wire_dtype,
            num_visits=self._placement.num_visits,
            room=self._room,
            refresh=refresh,
            spare=self._waiting.spare if self._waiting is not None else None,
        )

    def has_gradient(self, chunk: Chunk) -> bool:
        assert self._waiting is not None
        return self._waiting.has_gradient(chunk)

    def waiting_gradient(self, chunk: Chunk) -> tuple[Callable[[], Tensor], list[Fence]]:
        assert self._waiting is not None
        return self._waiting.gradient(chunk)

    def squared_norms(self) -> dict[tuple[int, str], float]:
        assert self.gradients is not None
        return self.gradients.squared_norms()

    def resting(self, unit_index: int) -> frozenset[str]:
        """Return the parameters of a block that this step leaves out."""
        assert self.gradients is not None
        return self.gradients.resting(unit_index)

    def tell_passed_by(self) -> None:
        assert self.gradients is not None
        self.gradients.tell_passed_by()

    def name_of(self, key: tuple[int, str]) -> str:
        unit = next(unit for unit in self.units if unit.index == key[0])
        return unit.full_name(key[1]) if key[1] else unit.name

    @property
    def device(self) -> torch.device:
        return self._device

    def refuse_second_update(self, unit: Unit) -> None:
        """Raise if an update during this backward, of the whole unit, has begun already."""
        if self._passing is not None:
            self._passing.check(unit, 0)

    def drop_gradients(self, is_on: bool) -> None:
        """Measure the gradients of updates during the backward, and do nothing else with them."""
        assert self._passing is not None
        self._passing.drops = is_on

    def compute_fence(self) -> Fence:
        return Fence.after_compute(self._device)

    def queue(self, updates: list[ChunkUpdate]) -> None:
        """Hand updates over; units whose weights they change are marked before anyone starts."""
        self._has_loaded_masters = False
        left = list(updates)
        try:
            for update in updates:
                unit = update.chunk.unit
                unit.update_queued(
                    [*(f for f in unit.pending if not f.is_done), update.weight_ready]
                )
                self._readers.hold_up(update)
                if self._waiting is not None:
                    update.on_read = partial(self._waiting.was_read, update.chunk)
            assert self._updaters is not None
            self._updaters.hand_over(left)
        except BaseException as error:  # nobody has the rest: whoever waits for it must not hang
            for update in left:
                update.fail(error)
            raise
        finally:
            for update in updates:
                self._readers.queued(update)
        if self._waiting is not None:
            assert self.gradients is not None
            self.gradients.used()
            self._prefetch()

    def settle_once(self) -> None:
        """Bring state to the device as far as it has room, after a first whole step."""
        if self._updaters is not None:
            self._updaters.settle_once()

    def begin_forward(self) -> None:
        """Say that all updates of this step have been queued, in passing mode."""
        self.settle_once()
        self._prefetch()

    def clear_gradients(self) -> None:
        if self._waiting is not None:
            self._waiting.clear()
        if self.gradients is not None:
            self.gradients.cleared()

    def read_state(self, unit: Unit, read: Callable[[UnitState, list[Fence]], list[Fence]]) -> None:
        """Let ``read`` submit work that reads a unit's state as the last ``step()`` leaves it.

        It gets the fences to wait for and returns those of its work; the unit's next update waits
        for these, a forward does not. The calling thread is the one that calls ``step()``.
        """
        assert self._updaters is not None
        after = [*self._readers.last_updates(unit), self.compute_fence()]
        after += self._updaters.send_home(unit)
        if unit.is_on_disk:
            assert self._checks is not None
            check = partial(self.check_on_disk, unit)
            after.append(self._checks.submit(check, after=after, label=f"check {unit.name}"))
        self._readers.read(unit, read(self.states[unit.index], after))

    def check_on_disk(self, unit: Unit) -> None:
        """Raise StoreError unless the views of what is on disk show what was last written."""
        state = self.states[unit.index]
        if state.weight_on_disk is not None:
            state.weight_on_disk.check()
        for tensor in state.rest_on_disk.values():
            tensor.check()

    def check_rest_on_disk(self) -> None:
        """``check_on_disk`` for the state of all units, but not for their weights."""
        for state in self.states.values():
            for tensor in state.rest_on_disk.values():
                tensor.check()

    def synchronize(self) -> None:
        """Wait for every update, and bring all state home."""
        self._readers.block()  # whoever calls this may write to the homes
        if self._updaters is not None:
            self._updaters.synchronize()
        for unit in self.units:
            unit.block_until_updated()
        if self._disk is not None:
            self._disk.check_uncut()  # before anyone looks at a view of it

    @property
    def num_updated(self) -> dict[str, int]:
        """Elements updated so far, by updater."""
        return {} if self._updaters is None else self._updaters.num_updated

    @property
    def num_visits(self) -> int:
        """Chunks that have buffers on the device."""
        return 0 if self._updaters is None else self._updaters.num_visits

    @property
    def host_busy_s(self) -> float:
        """Seconds that the host's cores have spent updating."""
        return 0.0 if self._updaters is None else self._updaters.host_busy_s

    def weights_replaced(self, units: Sequence[Unit]) -> None:
        """Say that weights and remainders were written from outside: copies elsewhere are stale.

        Other state is left alone: taken over from its view, harm to it would pass for its value.
        """
        if self._has_loaded_masters:
            warnings.warn(
                "weights were written after the optimizer's state was loaded: the lower bits of "
                "their fp32 masters (remainder) that it brought are lost. Load the model first, "
                "then the optimizer.",
                RuntimeWarning,
                stacklevel=3,
            )
        self._has_loaded_masters = False
        for unit in units:
            written = [unit.disk_weight]
            if unit.index in self.states:
                state = self.states[unit.index]
                written += [state.weight_on_disk, state.rest_on_disk.get("remainder")]
            for tensor in dict.fromkeys(written):
                if tensor is not None:
                    tensor.rewrite()
        self._homes_written()

    def state_replaced(self, units: Sequence[Unit], *, with_remainder: bool) -> None:
        """Say that state was written from outside, and no weights."""
        has_place = self._placement.state_format.remainder is not None
        self._has_loaded_masters = with_remainder and has_place
        for unit in units:
            for tensor in self.states[unit.index].rest_on_disk.values():
                tensor.rewrite()
        self._homes_written()

    def _homes_written(self) -> None:
        if self._updaters is not None:
            self._updaters.homes_written()

    @property
    def is_alive(self) -> bool:
        """Whether the model is offloaded still, and this was started."""
        return self.gradients is not None

    def check_alive(self) -> None:
        if not self.is_alive:
            raise OutcoreError("the model of this optimizer was released by outcore.release()")

    def close(self) -> None:
        """End every thread; updates that nobody took fail with a clear error."""
        if self._updaters is not None:
            self._updaters.close()
        for lane in self._lanes:
            lane.close()
        if self._updaters is not None:
            self._updaters.join()
        # Where the state is on the device, the compute stream copies new weights home, and no lane
        # has waited for it: they must land before anyone frees their memory.
        for event in (fence.event for unit in self.units for fence in unit.pending):
            if event is not None:
                with contextlib.suppress(RuntimeError):  # after a CUDA error the rest must close
                    event.synchronize()
        self.gradients = None

    def _direct_gradient(self, chunk: Chunk) -> tuple[Tensor, list[Fence]] | None:
        return None if self._updaters is None else self._updaters.gradient_buffer(chunk)
