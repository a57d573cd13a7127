"""Bytes and least step times of many choices at once.

Sums over leading blocks make both a few array operations. memory.py and simulate.py say the same
of one placement, in full; what is chosen here is counted and played there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec
from outcore.optim.gradient_sinks import num_ring_buffers
from outcore.planning.choices import Choice, Choices, Counts
from outcore.planning.cost import Costs, input_bytes
from outcore.planning.held_writes import held_share
from outcore.planning.memory import MemoryModel
from outcore.planning.plan import Job
from outcore.planning.simulate import Simulated, simulate
from outcore.planning.state_bytes import StateBytes
from outcore.planning.update_lanes import MAX_DISK_PIECES
from outcore.store.record_layout import page_aligned_bytes

Values = NDArray[np.float64]
_DEVICE, _HOST = range(2)


def _sums(values: Sequence[float]) -> Values:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


class ChoiceTable:
    """What the choices of one model, machine and job come to."""

    def __init__(self, spec: ModelSpec, machine: Machine, job: Job, micro_batch: int) -> None:
        self.memory = MemoryModel(spec, machine, job, micro_batch)
        self.costs = Costs(spec, machine, job, micro_batch)
        self.num_blocks = n = len(spec.blocks)
        self.micro_batch = micro_batch
        self.is_unified = machine.is_unified
        self._gradients_wait = job.gradients_wait
        self._num_passes = job.num_passes
        self._input_bytes = tuple(input_bytes(block, job) for block in spec.blocks)
        self._sizes = StateBytes.of(job)
        weights = [
            float(b.span_numel(job.dtype, job.frozen_weights) * self._sizes.weight)
            for b in spec.blocks
        ]
        self._weights = _sums(weights)
        self._largest_after = np.maximum.accumulate([0.0, *reversed(weights)])[::-1]
        trained = [b.trainable_numel for b in spec.blocks]
        self._trained = _sums(trained)
        self._disk_weights = _sums([page_aligned_bytes(int(num_bytes)) for num_bytes in weights])
        state, with_master = (
            _sums([self._sizes.state_on_disk(n, with_master=m) if n else 0 for n in trained])
            for m in (False, True)
        )
        self._disk_state, self._disk_masters = state, with_master - state
        self._inputs = _sums(self._input_bytes)
        self._kept = _sums([self.memory.kept_bytes(i) for i in range(n)])
        self._forward = _sums([c.forward_s for c in self.costs.blocks])
        self._differentiate = _sums([c.differentiate_s for c in self.costs.blocks])
        self._edges = float(sum(e.trainable_numel for e in spec.edges))
        units = self.memory.units
        self._first_edges = float(sum(units.units[u].trainable_numel for u in units.first_edges))
        largest = max(unit.trainable_numel for unit in units.units)
        self._ring, self._disk_ring = (
            float(
                max(num_ring_buffers(units.max_chunk, on_disk=on_disk) * units.max_chunk, largest)
            )
            for on_disk in (False, True)
        )
        self._disk_ring += 2 * largest  # gradients that leave the device after its last work
        self._disk_piece = max(units.max_chunk, units.largest_piece, largest / MAX_DISK_PIECES)
        self._chunk_sums = {
            unit: _sums([size for of, size in units.chunks if of == unit])
            for unit in sorted({of for of, _ in units.chunks})
        }
        blocks = [i for i, unit in enumerate(units.units) if unit.block is not None]
        self._first_chunks = np.array(
            [*(units.first_chunk(i) for i in blocks), 0], dtype=np.float64
        )
        self._fixed = self._fixed_bytes()
        kept_blocks = [[i >= n - kept for i in range(n)] for kept in range(n + 1)]
        self._working, self._working_offloading = (
            np.array([self.memory.working_bytes(keeps, offloads=o) for keeps in kept_blocks])
            for o in (False, True)
        )

    def simulate(self, choice: Choice, *, records: bool = False) -> Simulated:
        return simulate(
            self.costs,
            self.memory.units,
            choice.placement(self.num_blocks, self.micro_batch),
            gradients_wait=self._gradients_wait,
            num_passes=self._num_passes,
            input_bytes=self._input_bytes,
            records=records,
        )

    # --- bytes ----------------------------------------------------------------------------------

    def _fixed_bytes(self) -> float:
        """What every choice has on the device: edges, gradient buffers, norms."""
        n = self.num_blocks
        all_device = Choice(first_device_weights=n, first_device_state=n, edge_state=_DEVICE)
        device = self.memory.tiers(all_device.placement(n, self.micro_batch))["device"]
        return float(
            device.get("resident weights", 0)
            - self._weights[-1]
            + device.get("gradient buffers", 0)
            + device.get("expanded weights", 0)
            + device.get("block inputs", 0)
            - self._inputs[-1]
        )

    def bytes_of(self, c: Choices) -> tuple[Values, Values, Values]:
        """Return the bytes on device, host and disk, as memory.py counts them."""
        n, sizes, trained, weights = self.num_blocks, self._sizes, self._trained, self._weights
        units = self.memory.units
        w, s, dw, ds = (
            c.first_device_weights,
            c.first_device_state,
            c.last_disk_weights,
            c.last_disk_state,
        )
        with_gradient = sizes.state + (sizes.gradient if self._gradients_wait else 0)
        recomputing = n - c.last_kept
        offloads = c.offloads_inputs > 0
        device = self._fixed + weights[w] + c.num_slots * self._largest_after[w]
        device += trained[s] * with_gradient + self._lodged_bytes(c)
        device += self._inputs[n] - self._inputs[recomputing]
        device += self._kept[n] - self._kept[recomputing]
        device += np.where(
            offloads, self._working_offloading[c.last_kept], self._working[c.last_kept]
        )
        largest_input = max(self._input_bytes)
        device += np.where(
            offloads, np.minimum(3, recomputing) * largest_input, self._inputs[recomputing]
        )
        host = weights[n - dw] - weights[w] + (trained[n - ds] - trained[s]) * sizes.state
        disk = self._disk_weights[n] - self._disk_weights[n - dw]
        disk += self._disk_state[n] - self._disk_state[n - ds]
        copy = 0 if self.is_unified else sizes.weight  # master copies of resident weights
        host += np.maximum(0.0, trained[np.minimum(w, n - ds)] - trained[s]) * copy
        masters = self._disk_masters
        disk += np.maximum(0.0, masters[w] - masters[np.maximum(n - ds, s)])
        device += np.where(c.edge_state == _DEVICE, self._edges * with_gradient, 0.0)
        host += np.where(c.edge_state == _HOST, self._edges * (sizes.state + copy), 0.0)
        blocks_leave = trained[n] - trained[s]
        edges_leave = np.where(c.edge_state == _DEVICE, 0.0, self._edges)
        if self._gradients_wait:
            host += (blocks_leave + edges_leave) * sizes.gradient
        else:
            on_disk = np.maximum(ds, dw)
            sizes_and_where = (
                (units.block_chunk, (blocks_leave > 0) & (s < n - on_disk)),
                (units.largest_piece, (blocks_leave > 0) & (on_disk > 0)),
                (units.edge_chunk, edges_leave > 0),
            )
            chunk = np.max([where * size for size, where in sizes_and_where], axis=0)
            for size, has_pieces in product({size for size, _ in sizes_and_where}, (False, True)):
                is_this = (chunk == size) & ((on_disk > 0) == has_pieces)
                ring = size * num_ring_buffers(size, on_disk=has_pieces)
                host += is_this * float(ring * sizes.gradient)
        staging = np.where(
            w > n - ds,  # some state on disk has the master of a resident weight beside it
            units.state_staging_bytes(sizes, with_masters=True),
            units.state_staging_bytes(sizes, with_masters=False),
        )
        host += (ds > 0) * staging
        host += (dw > 0) * float(units.weight_staging_bytes(sizes))
        host += offloads * self._inputs[recomputing] + self.memory.checkpoint_staging_bytes
        if self.is_unified:
            return device + host, np.zeros(len(c)), disk
        return device, host, disk

    def _lodged(self, c: Choices) -> tuple[Values, Values]:
        """Return the elements that lodge of first edges and first block, and their bytes."""
        units, sizes, n = self.memory.units, self._sizes, self.num_blocks
        left = c.num_visits - c.num_helping
        numel, num_bytes = np.zeros(len(c)), np.zeros(len(c))
        for unit, sums in self._chunk_sums.items():
            block = units.units[unit].block
            resident = block is None or block < c.first_device_weights
            count = np.where(self._is_on_host(c, unit), np.minimum(left, len(sums) - 1), 0)
            each = sizes.state + sizes.gradient + np.where(resident, 0, sizes.weight)
            numel += sums[count]
            num_bytes += sums[count] * each
            left = left - count
        # With none of these on the host, the first chunk of the first block there lodges.
        s, has_host = c.first_device_state, c.first_device_state < n - c.last_disk_state
        other = np.where((left > 0) & has_host, self._first_chunks[s], 0.0)
        each = sizes.state + sizes.gradient + np.where(s < c.first_device_weights, 0, sizes.weight)
        return numel + other, num_bytes + other * each

    def capped_visits(self, c: Choices) -> Choices:
        """Return the choices with no more visits than there are urgent chunks on the host."""
        available = np.zeros(len(c), dtype=np.int64)
        for unit, sums in self._chunk_sums.items():
            available += np.where(self._is_on_host(c, unit), len(sums) - 1, 0)
        has_host = c.first_device_state < self.num_blocks - c.last_disk_state
        most = np.where(available > 0, available + 2, np.where(has_host, 3, 0))
        return c.but(num_visits=np.minimum(c.num_visits, most))

    def _is_on_host(self, c: Choices, unit: int) -> Any:
        block = self.memory.units.units[unit].block
        if block is None:
            return c.edge_state == _HOST
        return (c.first_device_state <= block) & (block < self.num_blocks - c.last_disk_state)

    def _lodged_bytes(self, c: Choices) -> Values:
        units = self.memory.units
        has_host = c.first_device_state < self.num_blocks - c.last_disk_state
        chunk = np.maximum(has_host * units.block_chunk, (c.edge_state == _HOST) * units.edge_chunk)
        visit = chunk * float(self._sizes.moved + self._sizes.gradient)
        total: Values = self._lodged(c)[1] + c.num_helping * visit
        return total

    def num_urgent(self) -> int:
        """Return how many chunks could lodge."""
        return len(self.memory.units.chunks)

    @staticmethod
    def extreme(
        low: Counts, high: Counts, holds: Callable[[Counts], NDArray[Any]], *, largest: bool
    ) -> Counts:
        """Return, for each choice, the largest or least count in [low, high] for which it holds.

        ``holds`` is monotone; where it never holds, the last count tried comes back.
        """
        low, high = low.copy(), high.copy()
        while bool((is_open := low < high).any()):
            middle = (low + high + 1) // 2 if largest else (low + high) // 2
            good = holds(middle)
            raised, lowered = (middle, middle - 1) if largest else (middle + 1, middle)
            raises = good if largest else ~good
            low = np.where(is_open & raises, raised, low)
            high = np.where(is_open & ~raises, lowered, high)
        return low

    # --- time -----------------------------------------------------------------------------------

    def least_s(self, c: Choices) -> Values:
        """Return step times that no simulation goes below: each lane's work, and the waits
        of a forward for the updates before it."""
        n, costs, sizes, trained = self.num_blocks, self.costs, self._sizes, self._trained
        forward, weights = self._forward, self._weights
        w, s, dw, ds = (
            c.first_device_weights,
            c.first_device_state,
            c.last_disk_weights,
            c.last_disk_state,
        )
        lodged = self._lodged(c)[0]
        edges_leave = c.edge_state != _DEVICE
        backward = self._differentiate[n] + forward[n - c.last_kept]
        device_updates = trained[s] + np.where(edges_leave, 0.0, self._edges) + lodged
        begin = 2 * costs.embedding_s + costs.step_start_s
        first = begin + costs.update_on_device_s(1.0) * device_updates
        # A pass that only measures; the last updates of the step before end during its forward.
        one_pass = begin + forward[n] + backward + costs.head_s
        measuring = (self._num_passes - 1) * one_pass
        without_updates = (self._num_passes - 1) * (one_pass - forward[n])
        compute = first + forward[n] + backward + costs.head_s + measuring
        each = costs.update_on_host_s(1.0)  # seconds a parameter
        if self.is_unified:
            on_host = trained[n] - trained[n - ds]
            first_edges = np.zeros(len(c))
        else:
            on_host = trained[n] - trained[s] + edges_leave * self._edges - lodged
            first_edges = np.maximum(0.0, edges_leave * self._first_edges - lodged)
        host = np.maximum(0.0, on_host) * each
        lanes = [compute, host]
        if self._gradients_wait:
            # Block k starts after the updates before it: the latest of these starts sets the pace.
            k = np.unique(np.linspace(0, n - 1, min(n, 24)).astype(np.int64))[None, :]
            before = np.maximum(
                0.0,
                (edges_leave * self._first_edges - lodged)[:, None]
                + np.maximum(0.0, trained[k + 1] - trained[s][:, None]),
            )
            if self.is_unified:
                before = np.maximum(0.0, trained[k + 1] - trained[n - ds][:, None])
            ends = (before * each + (forward[n] - forward[k])).max(axis=1)
            lanes.append(np.maximum(ends, host) + costs.head_s + backward)
        else:
            # Of the first edges' state, what lodges is updated beside what the host has of it.
            beside = costs.step_start_s + costs.update_on_device_s(1.0) * lodged
            lanes.append(compute - beside + first_edges * each)
            lanes.append(
                np.maximum(0.0, on_host - 2 * self._ring) * each + forward[n] + without_updates
            )
        if not self.is_unified:
            fetched = 2 * (weights[n] - weights[w]) - c.num_slots * self._largest_after[w]
            moved = np.maximum(0.0, fetched) + c.offloads_inputs * self._inputs[n - c.last_kept]
            lanes.append(self._num_passes * moved / costs.machine.to_device_bytes_s)
        if costs.machine.disk_read_bytes_s and costs.disk_update_bytes_s:
            disk_weights = weights[n] - weights[n - dw]
            state = (trained[n] - trained[n - ds]) * sizes.state
            # What is written while the backward runs is read alone.
            last = int(np.searchsorted(trained, trained[n])) - 1  # block that is trained
            holds = self._gradients_wait and (last >= w) & (last < n - dw)
            alone = state * held_share(costs) * holds
            read = (state - alone) / costs.disk_update_bytes_s
            read += alone / max(costs.machine.disk_read_bytes_s, costs.disk_update_bytes_s)
            # The forward's last blocks are still in their slots when the backward begins.
            again = np.maximum(0.0, disk_weights - c.num_slots * self._largest_after[n - dw])
            fetched = self._num_passes * (disk_weights + again)
            lanes.append(read + fetched / costs.machine.disk_read_bytes_s)
            # What has not passed through staging, or the ring, holds up the forward or backward.
            staged = float(self.memory.units.staged_numel + 2 * self._disk_piece)
            held = staged if self._gradients_wait else staged + self._disk_ring
            through = np.maximum(0.0, state - alone - held * sizes.moved)
            written = through / costs.disk_update_bytes_s
            if self._gradients_wait:
                lanes.append(np.maximum(read, written) + costs.head_s + backward)
            else:
                lanes.append(written + forward[n] + without_updates)
        least: Values = np.max(np.stack(lanes), axis=0)
        return least
