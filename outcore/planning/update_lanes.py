"""Optimizer updates in a simulated step: who updates when, on host cores, device or through disk.

Where gradients wait for clipping, every update waits for the end of the backward and runs in the
order in which the next forward needs it; of state on disk, the last is held back (held_writes.py).
Elsewhere gradients pass through a ring of host buffers straight into updates; of those that have
arrived, the one that the forward needs first goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.optim.gradient_sinks import num_ring_buffers
from outcore.planning.cost import Costs
from outcore.planning.held_writes import HeldWrites
from outcore.planning.lanes import DISK_READ, DISK_WRITE, HOST, TO_DEVICE, TO_HOST, LaneClock
from outcore.planning.placement import Placement, Units

MAX_DISK_PIECES = 6  # of one unit on its way through the disk
MAX_STAGED = 16  # pieces that are remembered: more than can be on their way


@dataclass(kw_only=True, eq=False)
class _Pending:
    """A gradient that has left the device and waits for its update."""

    unit: int
    numel: float
    ready_s: float


class UpdateLanes:
    """Plays updates, and knows when each unit's new weights are where the forward takes them."""

    def __init__(
        self,
        clock: LaneClock,
        costs: Costs,
        units: Units,
        placement: Placement,
        *,
        gradients_wait: bool,
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._gradients_wait = gradients_wait
        lodging = units.lodging(placement)
        self.sizes = [unit.trainable_numel for unit in units.units]
        self.lodged = [lodging.get(i, 0) for i in range(len(self.sizes))]
        self.tiers = [units.state_tier(placement, i) for i in range(len(self.sizes))]
        self.weights = [units.weights_tier(placement, i) for i in range(len(self.sizes))]
        if costs.machine.is_unified:
            self.tiers = ["device" if tier == "host" else tier for tier in self.tiers]
        self.uses_disk = "disk" in self.tiers
        # Looked up once: a search plays each of these some hundred thousand times.
        sizes, all_units = costs.bytes, range(len(self.sizes))
        self._disk_bytes = [  # of a parameter, on its way to a disk and back
            sizes.state + (0 if weights == "host" else sizes.weight) for weights in self.weights
        ]
        self._gradient_of, self._state_of, self._update_of = (
            [f"{what} {i}" for i in all_units] for what in ("gradient", "state", "update")
        )
        self.ready = [0.0] * len(self.sizes)  # new weights of each unit
        self.awaited = [HOST] * len(self.sizes)  # the lane that made them late
        self._largest_piece = float(units.largest_piece)
        self._staged_numel = units.staged_numel
        # Pieces of a third of a block are fine enough, also where the ring holds less than a block.
        # Through a disk it holds little, and the device is held up by what has no place there; two
        # pieces as they are played here are on their way all the same.
        is_on_disk = "disk" in (*self.tiers, *self.weights)
        num_buffers = num_ring_buffers(units.max_chunk, on_disk=is_on_disk)
        least = [2 * self._disk_piece(size) for size in self.sizes] if is_on_disk else self.sizes
        self._ring_room = float(max(num_buffers * units.max_chunk, *least))
        self._piece = self._ring_room / 3
        self.held_up_by = TO_HOST  # the lane for which gradients wait on the device
        self._last_updater = HOST
        self._pending: list[_Pending] = []
        self._arrived: dict[int, float] = {}  # gradients that wait for clipping
        self._next = len(self.sizes)  # unit whose waiting update is played next
        self._begun = 0.0
        self._staged: list[tuple[float, float]] = []  # elements, and when they were written
        self._held: HeldWrites | None = None
        on_disk = [i for i, tier in enumerate(self.tiers) if tier == "disk" and self.sizes[i]]
        if gradients_wait and on_disk and self.weights[on_disk[-1]] == "host":
            pairs = zip(self.tiers, self.sizes, strict=True)
            numels = [size if tier == "disk" else 0 for tier, size in pairs]
            self._held = HeldWrites(
                clock,
                costs,
                numels,
                num_ahead=units.staged_numel / 2,
                rest_s=_backward_s(costs, placement),
            )

    # --- gradients leave the device -----------------------------------------------------------

    def begin_pass(self, at: float) -> None:
        """Say that the pass begins whose gradients are delivered: state may be read for them."""
        if not self._gradients_wait:
            self._begun = at

    def deliver(self, unit: int, at: float) -> float:
        """Take a unit's gradient, complete at ``at``; return when its buffer may be reused."""
        self.held_up_by = TO_HOST
        numel = self.sizes[unit]
        if not numel:
            return at
        if self.tiers[unit] == "device":
            return self._waits_or_updates(unit, at)
        if self._gradients_wait:
            free_at = self._held.free_at(unit) if self._held is not None else 0.0
            end = self._leave(unit, numel, max(at, free_at))
            self._arrived[unit] = end
            return end
        left, end = float(numel - self.lodged[unit]), at
        if self.lodged[unit]:
            self.ready[unit] = self._on_device(unit, self.lodged[unit], at)
        piece = self._disk_piece(left) if self.tiers[unit] == "disk" else self._piece
        while left > 0:
            size = min(piece, left)
            end = self._leave(unit, size, max(at, self._room_for(size)))
            self._ring_room -= size
            self._pending.append(
                _Pending(unit=unit, numel=size, ready_s=self._state_in(unit, size, end))
            )
            left -= size
        return end

    def _leave(self, unit: int, numel: float, after: float) -> float:
        duration = self._costs.to_host_s(numel * self._costs.bytes.gradient, both_ways=True)
        return self._clock.run(TO_HOST, duration, after, self._gradient_of[unit])

    def _waits_or_updates(self, unit: int, at: float) -> float:
        if self._gradients_wait:
            self._arrived[unit] = at
        else:
            self.ready[unit] = self._on_device(unit, self.sizes[unit], at)
        return at

    # --- updates during the backward ----------------------------------------------------------

    def _room_for(self, numel: float) -> float:
        """Run updates until the ring holds ``numel`` more; return when it does."""
        freed = 0.0
        while self._ring_room < numel and self._pending:
            freed = self._run_pending()
        if freed > self._clock.free[TO_HOST]:
            self.held_up_by = self._last_updater
        return freed

    def _run_pending(self) -> float:
        """Play the update that the host takes next; return its end."""
        pending = self._pending
        now = max(self._clock.free[HOST], min([p.ready_s for p in pending]))
        chosen = None
        for one in pending:
            if one.ready_s <= now and (chosen is None or one.unit < chosen.unit):
                chosen = one
        assert chosen is not None
        pending.remove(chosen)
        end = self._on_host(chosen.unit, chosen.numel, chosen.ready_s)
        self._ring_room += chosen.numel
        self._last_updater = self.awaited[chosen.unit]
        self.ready[chosen.unit] = max(self.ready[chosen.unit], end)
        return end

    def end_backward(self, at: float) -> None:
        """Say that all gradients of this step exist."""
        while self._pending:
            self._run_pending()
        self._begun = at
        self._next = 0
        if self._held is not None:
            self._held.begin_step()
        if not self._gradients_wait:
            self._next = len(self.sizes)

    # --- updates that waited for clipping -----------------------------------------------------

    def update_until(self, unit: int) -> None:
        """Play waiting updates in forward order, up to and including ``unit``."""
        while self._next <= min(unit, len(self.sizes) - 1):
            self._update_waiting(self._next)
            self._next += 1

    def _update_waiting(self, unit: int) -> None:
        numel, arrived = self.sizes[unit], self._arrived.get(unit)
        if not numel or arrived is None:
            return
        at = max(arrived, self._begun)
        if self.tiers[unit] == "device":
            self.ready[unit] = self._on_device(unit, numel, self._begun)
            return
        if self.lodged[unit]:
            self.ready[unit] = self._on_device(unit, self.lodged[unit], self._begun)
        left = float(numel - self.lodged[unit])
        piece = self._disk_piece(left) if self.tiers[unit] == "disk" else left
        while left > 0:
            size = min(piece, left)
            held = self._held if self.tiers[unit] == "disk" else None
            if held is not None and held.holds(size):
                end = self._hold(unit, size, at, held)
            else:
                end = self._on_host(unit, size, self._state_in(unit, size, at))
            if held is not None:
                held.write(end)
            self.ready[unit] = max(self.ready[unit], end)
            left -= size

    def _hold(self, unit: int, numel: float, arrived: float, held: HeldWrites) -> float:
        """Update state that is not written yet; return when it is."""
        num_bytes = numel * self._disk_bytes[unit]
        read = self._costs.disk_read_s(num_bytes)
        here = self._clock.run(DISK_READ, read, self._disk_begins(), self._state_of[unit])
        held.hold(unit, num_bytes)
        self.awaited[unit] = DISK_READ
        duration = self._costs.update_on_host_s(numel)
        return self._clock.run(HOST, duration, max(arrived, here), self._update_of[unit])

    # --- one update ---------------------------------------------------------------------------

    def _state_in(self, unit: int, numel: float, arrived: float) -> float:
        """Read state from disk, where it lives there; return when the update may start."""
        if self.tiers[unit] != "disk":
            return arrived
        after = max(self._room_in_staging(numel), self._disk_begins())
        read = self._costs.disk_update_s(numel * self._disk_bytes[unit])
        return max(arrived, self._clock.run(DISK_READ, read, after, self._state_of[unit]))

    def _disk_begins(self) -> float:
        """Return when state may be read: a disk shares what it has between both ways."""
        return max(self._begun, self._held.written_at if self._held is not None else 0.0)

    def _room_in_staging(self, numel: float) -> float:
        """Return when those that went through staging last leave room for more elements.

        Pieces are played in larger ones than they are: two of these are always on their way.
        """
        left = max(self._staged_numel, 2 * numel) - numel
        for size, written in reversed(self._staged):
            left -= size
            if left < 0:
                return written
        return 0.0

    def _disk_piece(self, numel: float) -> float:
        """Return the elements that are read, updated and written as one."""
        return max(self._largest_piece, numel / MAX_DISK_PIECES)

    def _on_host(self, unit: int, numel: float, after: float) -> float:
        costs, clock = self._costs, self._clock
        on_disk = self.tiers[unit] == "disk"
        end = clock.run(HOST, costs.update_on_host_s(numel), after, self._update_of[unit])
        self.awaited[unit] = HOST
        if on_disk:
            write = costs.disk_update_s(numel * self._disk_bytes[unit])
            written = clock.run(DISK_WRITE, write, end, self._state_of[unit])
            self._staged.append((numel, written))
            del self._staged[:-MAX_STAGED]
            free = clock.free
            self.awaited[unit] = DISK_READ if free[DISK_READ] >= free[DISK_WRITE] else DISK_WRITE
            if self.weights[unit] == "disk":
                end = written
        if self.weights[unit] == "device":
            refresh = costs.to_device_s(numel * costs.bytes.weight)
            clock.busy[TO_DEVICE] += refresh  # on a stream of its own: holds up no fetch
            end += refresh
        return end

    def _on_device(self, unit: int, numel: float, after: float) -> float:
        costs, clock = self._costs, self._clock
        duration = costs.update_on_device_s(numel)
        home = 0.0
        if self.weights[unit] == "host" and not self.lodged[unit]:  # the weight comes and goes
            duration += costs.to_device_s(numel * costs.bytes.weight)
        if self.weights[unit] == "host":
            home = costs.to_host_s(numel * costs.bytes.weight)
        end = clock.compute(duration, after, HOST, self._update_of[unit])
        return clock.run(TO_HOST, home, end, f"weight {unit}") if home else end


def _backward_s(costs: Costs, placement: Placement) -> float:
    """Return how long the device computes from the loss to the first block's gradient."""
    blocks = zip(costs.blocks, placement.blocks, strict=True)
    return costs.head_s + sum(
        cost.differentiate_s + (0.0 if block.activations == "keep" else cost.forward_s)
        for cost, block in blocks
    )
