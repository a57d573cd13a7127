"""One step played over the lanes by the engine's rules.

Slots bound how far weights are fetched ahead, gradients leave once per block, and updates follow
(update_lanes.py). Several steps are played, and the last counts: work that one step leaves behind
is done in the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outcore.planning.cost import Costs
from outcore.planning.lanes import COMPUTE, DISK_READ, TO_DEVICE, TO_HOST, LaneClock
from outcore.planning.placement import Placement, Units
from outcore.planning.plan import Span
from outcore.planning.update_lanes import UpdateLanes

NUM_STEPS = 3
FULL = 0.99  # a lane that works for more than this part of the step binds
BINDS = 0.05  # compute binds if it waits for less than this part of the step
_DISK_BUFFERS = 2  # host buffers that disk weights pass through


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The last of the steps played."""

    step_s: float
    busy_s: dict[str, float]
    binding_lane: str
    timeline: tuple[Span, ...] = field(default=(), repr=False)


def simulate(
    costs: Costs,
    units: Units,
    placement: Placement,
    *,
    gradients_wait: bool,
    num_passes: int = 1,
    input_bytes: tuple[int, ...],
    num_steps: int = NUM_STEPS,
    records: bool = False,
) -> Simulated:
    """Play ``num_steps`` steps; ``input_bytes`` are those of each block's input.

    Of ``num_passes`` over the batch, all but the last only measure the gradients.
    """
    clock = LaneClock(records=records)
    updates = UpdateLanes(clock, costs, units, placement, gradients_wait=gradients_wait)
    step = _Step(clock, updates, costs, units, placement, input_bytes)
    begin = end = 0.0
    for _ in range(num_steps):
        begin = end
        clock.begin_step()
        for _ in range(num_passes - 1):
            step.forward()
            step.backward(delivers=False)
        updates.begin_pass(clock.free[COMPUTE])
        step.forward()
        end = step.backward()
    # A lane that has more to do than the step is long falls behind a little more in each one.
    busiest = max(clock.busy, key=lambda lane: clock.busy[lane])
    duration = max(end - begin, clock.busy[busiest])
    binding = COMPUTE
    if clock.busy[busiest] > FULL * duration:
        binding = busiest
    elif sum(clock.waits.values()) > BINDS * duration:
        binding = max(clock.waits, key=lambda lane: clock.waits[lane])
    return Simulated(
        step_s=duration,
        busy_s=dict(clock.busy),
        binding_lane=binding,
        timeline=clock.spans_between(begin, end) if records else (),
    )


class _Step:
    """Forward and backward of one step; keeps what the next step needs to know."""

    def __init__(
        self,
        clock: LaneClock,
        updates: UpdateLanes,
        costs: Costs,
        units: Units,
        placement: Placement,
        input_bytes: tuple[int, ...],
    ) -> None:
        self._clock = clock
        self._updates = updates
        self._costs = costs
        self._blocks = placement.blocks
        self._num_slots = placement.num_slots
        self._input_bytes = input_bytes
        self._unit_of = [i for i, unit in enumerate(units.units) if unit.block is not None]
        self._weight_s = [
            costs.to_device_s(units.units[i].numel * costs.bytes.weight) for i in self._unit_of
        ]
        self._weight_bytes = [units.units[i].numel * costs.bytes.weight for i in self._unit_of]
        is_copied = not costs.machine.is_unified
        self._streams = [
            block.weights == "disk" or (is_copied and block.weights == "host")
            for block in self._blocks
        ]
        self._first = list(units.first_edges)
        self._last = [
            i for i, u in enumerate(units.units) if u.block is None and i not in self._first
        ]
        self._slot_ends: list[float] = []  # of the last uses, the earliest first
        self._disk_ends: list[float] = []

    def forward(self) -> None:
        clock, updates, costs = self._clock, self._updates, self._costs
        if not updates.uses_disk:
            updates.update_until(len(updates.sizes))
        for unit in self._first:
            updates.update_until(unit)
        edges = max((updates.ready[u] for u in self._first), default=0.0)
        begin = max(edges, clock.free[COMPUTE] + costs.step_start_s)
        lane = updates.awaited[self._first[0]] if self._first else COMPUTE
        clock.compute(costs.embedding_s, begin, lane if edges >= begin else COMPUTE, "embedding")
        previous, ends = self._slot_ends, list[float]()
        offloaded: list[float] = []
        for i, block in enumerate(self._blocks):
            ahead = min(i + 2, len(self._blocks) - 1)  # reads for updates go before later fetches
            updates.update_until(self._unit_of[ahead])
            arrival, lane = updates.ready[self._unit_of[i]], updates.awaited[self._unit_of[i]]
            if self._streams[i]:
                slot = self._slot_free(len(ends), ends, previous)
                arrival, lane = self._fetch(i, arrival, lane, slot)
            if block.activations == "offload" and len(offloaded) >= 2:
                arrival = max(arrival, offloaded[-2])
            end = clock.compute(costs.blocks[i].forward_s, arrival, lane, f"forward {i}")
            if self._streams[i]:
                ends.append(end)
            if block.activations == "offload":
                copy = costs.to_host_s(self._input_bytes[i])
                offloaded.append(clock.run(TO_HOST, copy, end, f"input {i}"))
        updates.update_until(len(updates.sizes))
        edges = max((updates.ready[u] for u in self._last), default=0.0)
        lane = updates.awaited[self._last[-1]] if self._last else COMPUTE
        clock.compute(costs.head_s, edges, lane, "head and loss")

    def backward(self, *, delivers: bool = True) -> float:
        """Play the backward; return the end of its compute. Gradients may end on the device."""
        clock, updates, costs = self._clock, self._updates, self._costs
        for unit in self._last if delivers else ():
            updates.deliver(unit, clock.free[COMPUTE])
        ends: list[float] = []
        wires = [(0.0, TO_HOST)] * 2
        before = clock.free[COMPUTE]
        for i in range(len(self._blocks) - 1, -1, -1):
            block, cost = self._blocks[i], costs.blocks[i]
            arrival, lane = 0.0, TO_DEVICE
            if self._streams[i] and len(ends) >= self._num_slots:
                # The ones before are still in their slots from the forward.
                arrival, lane = self._fetch(i, 0.0, TO_DEVICE, ends[-self._num_slots])
            if block.activations == "offload":
                copy = costs.to_device_s(self._input_bytes[i], both_ways=True)
                arrival = max(arrival, clock.run(TO_DEVICE, copy, before, f"input {i}"))
            duration = cost.differentiate_s
            if block.activations != "keep":
                duration += cost.forward_s
            before = clock.free[COMPUTE]
            end = clock.compute(duration, arrival, lane, f"backward {i}")
            if wires[0][0] > end:  # both buffers for gradients are still on their way
                end = clock.compute(0.0, *wires[0], "")
            if self._streams[i]:
                ends.append(end)
            if delivers:
                free = updates.deliver(self._unit_of[i], end)
                wires = [wires[1], (free, updates.held_up_by)]
        end = clock.compute(costs.embedding_s, 0.0, COMPUTE, "embedding")
        self._slot_ends = ends[-self._num_slots :]
        if delivers:
            for unit in self._first:
                updates.deliver(unit, end)
            updates.end_backward(clock.free[COMPUTE])
        return clock.free[COMPUTE]

    def _slot_free(self, use: int, ends: list[float], previous: list[float]) -> float:
        if use >= self._num_slots:
            return ends[use - self._num_slots]
        return previous[use] if use < len(previous) else 0.0

    def _fetch(self, i: int, ready: float, awaited: str, slot: float) -> tuple[float, str]:
        """Bring a block's weights into a slot; return when, and which lane made it so late."""
        clock, costs = self._clock, self._costs
        after, lane = ready, awaited
        if self._blocks[i].weights == "disk":
            ends = self._disk_ends
            buffer = ends[-_DISK_BUFFERS] if len(ends) >= _DISK_BUFFERS else 0.0
            read = costs.disk_read_s(self._weight_bytes[i])
            after = clock.run(DISK_READ, read, max(ready, buffer), f"weights {i}")
            lane = DISK_READ
        start = max(clock.free[TO_DEVICE], slot)
        if start >= after:
            lane = TO_DEVICE
        end = clock.run(TO_DEVICE, self._weight_s[i], max(after, slot), f"weights {i}")
        if self._blocks[i].weights == "disk":
            self._disk_ends.append(end)
            del self._disk_ends[:-_DISK_BUFFERS]
        return end, lane
