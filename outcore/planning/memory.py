"""How many bytes a placement takes in each tier, by the purposes of the engine's books.

What the books do not see, because the allocator of the device makes it while a step runs, is
"working memory": one micro-batch being differentiated, or a chunk of logits with its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outcore.machine.machine import Machine
from outcore.model_spec import BlockSpec, ModelSpec
from outcore.optim.gradient_sinks import num_ring_buffers
from outcore.planning.cost import input_bytes
from outcore.planning.device_type import device_type, is_parted
from outcore.planning.loss_chunks import chunk_rows
from outcore.planning.placement import Placement, Units
from outcore.planning.plan import CHECKPOINT_STAGING, WORKING_MEMORY, Budgets, Job, Tier
from outcore.planning.state_bytes import StateBytes
from outcore.saved_activations import saves_little
from outcore.store.allocator_slack import fillable_bytes
from outcore.store.record_layout import page_aligned_bytes
from outcore.units import BYTES_OF

HOST_SHARE = 0.97  # of a machine's memory that a process gets
DEVICE_SHARE = 0.98
PROCESS_BYTES = 1_800_000_000  # interpreter, torch and its CUDA libraries; in no budget
WORKSPACE_BYTES = 100_000_000  # of the matrix products' own, on a GPU
_OFFLOADED_INPUTS = 3  # on the device at a time: going, in use, coming

TierBytes = dict[str, dict[str, int]]
_Sizes = NDArray[np.float64]  # bytes, block by block
_Add = Callable[[str, str, float], None]


def budgets_of(machine: Machine, budgets: Budgets) -> dict[str, int]:
    """Return the bytes that a plan may fill in each tier.

    One memory is the device's: a budget of the host is one of the same bytes. Of one that is parted
    the host has what the device leaves.
    """
    device = budgets.device_bytes
    if device is None:
        device = _device_gives(machine)
    host = budgets.host_bytes
    if host is None:
        host = _host_gives(machine)
    elif machine.is_unified:
        device = min(device, host)
    if is_parted(machine):
        memory = max(machine.host_memory_bytes, device, host)  # or with more, were it there
        left = int(memory * HOST_SHARE) - PROCESS_BYTES - device
        host = min(host, max(0, left))
    has_disk = machine.disk_read_bytes_s > 0 and machine.disk_both_ways_bytes_s > 0
    disk = budgets.disk_bytes if budgets.disk_bytes is not None else machine.disk_bytes
    return {
        "device": fillable_bytes(device, is_gpu=device_type(machine) == "cuda"),
        "host": 0 if machine.is_unified else host,
        "disk": disk if has_disk else 0,
    }


def _device_gives(machine: Machine) -> int:
    return int(machine.device_memory_bytes * DEVICE_SHARE)


def _host_gives(machine: Machine) -> int:
    return max(0, int(machine.host_memory_bytes * HOST_SHARE) - PROCESS_BYTES)


def largest_budgets(machine: Machine) -> dict[Tier, int]:
    """Return the budgets that a machine gives where none are asked for: more leaves too little.

    Of a memory that is parted each part may be all of it, as far as that alone goes.
    """
    if is_parted(machine):
        device, host = machine.device_memory_bytes, machine.host_memory_bytes
    else:
        device = _device_gives(machine)
        host = device if machine.is_unified else _host_gives(machine)
    return {"device": device, "host": host, "disk": machine.disk_bytes}


def machine_bytes(tier: Tier, budget: int, machine: Machine) -> int:
    """Return what a machine like this one would have of a tier to give such a budget."""
    if tier == "disk" or is_parted(machine):  # budgets of its parts are as large as the whole
        return budget
    if tier == "device" or machine.is_unified:
        return math.ceil(budget / DEVICE_SHARE)
    return math.ceil((budget + PROCESS_BYTES) / HOST_SHARE)


class MemoryModel:
    """Bytes of placements of one model and job; what does not change is counted once."""

    def __init__(self, spec: ModelSpec, machine: Machine, job: Job, micro_batch: int) -> None:
        self.units = Units(spec, job)
        self._spec = spec
        self._job = job
        self._is_unified = machine.is_unified
        self._is_gpu = device_type(machine) == "cuda"
        self._bytes = StateBytes.of(job)
        self._tokens = job.sequences * job.seq_len
        self._inputs = [input_bytes(block, job) for block in spec.blocks]
        width = spec.hidden_size * BYTES_OF[job.dtype]
        self._stream_bytes = self._tokens * width  # the hidden states of the batch
        num_micro_batches = -(-job.sequences // micro_batch)
        self._is_split = num_micro_batches > 1
        self._rows_at_once = micro_batch * job.seq_len
        self._saves_little = saves_little(self._rows_at_once * width)
        # A kept block holds its input and what autograd saved.
        self._kept = [
            int(self._kept_per_token(block) * self._tokens)
            + num_micro_batches * self._adapted_bytes(block)
            + kept_input
            for block, kept_input in zip(spec.blocks, self._inputs, strict=True)
        ]
        self._num_norms = sum(edge.runs_as_block for edge in spec.edges)

    def tiers(self, placement: Placement) -> TierBytes:
        """Return tier → purpose → bytes, without purposes that take none."""
        tiers: TierBytes = {"device": {}, "host": {}, "disk": {}}

        def add(tier: str, purpose: str, num_bytes: float) -> None:
            if self._is_unified and tier == "host":
                tier = "device"
            if num_bytes:
                purposes = tiers[tier]
                purposes[purpose] = purposes.get(purpose, 0) + int(num_bytes)

        self._add_weights(placement, add)
        self._add_state(placement, add)
        self._add_activations(placement, add)
        add("host", CHECKPOINT_STAGING, self.checkpoint_staging_bytes)
        return tiers

    def _add_weights(self, placement: Placement, add: _Add) -> None:
        each = self._bytes.weight
        largest_streamed, are_on_disk = 0, False
        for index, unit in enumerate(self.units.units):
            tier = self.units.weights_tier(placement, index)
            num_bytes = unit.numel * each
            if tier == "disk":
                num_bytes = page_aligned_bytes(num_bytes)
            add(tier, "resident weights" if tier == "device" else "weights", num_bytes)
            if tier != "device":
                largest_streamed = max(largest_streamed, unit.numel)
            are_on_disk = are_on_disk or tier == "disk"
        add("device", "weight slots", placement.num_slots * largest_streamed * each)
        expanded = [b.expanded_numel(self._job.frozen_weights) for b in self._spec.blocks]
        add("device", "expanded weights", max(expanded) * each)
        if are_on_disk:
            add("host", "disk staging", self.units.weight_staging_bytes(self._bytes))
        whole = [b.trainable_numel for b in self._spec.blocks]
        whole += [e.trainable_numel for e in self._spec.edges if e.runs_as_block]
        add("device", "gradient buffers", max(whole, default=0) * (4 + 2 * self._bytes.gradient))

    def _add_state(self, placement: Placement, add: _Add) -> None:
        sizes = self._bytes
        stages = with_masters = False
        ring_chunk, visiting_chunk, has_pieces = 0, 0, False
        for index, unit in enumerate(self.units.units):
            numel = unit.trainable_numel
            if not numel:
                continue
            tier = self.units.state_tier(placement, index)
            weights = self.units.weights_tier(placement, index)
            # Updated elsewhere, a resident weight has a master copy there; one memory needs none.
            if tier == "disk":
                state_bytes = float(sizes.state_on_disk(numel, with_master=weights == "device"))
            elif tier == "host" and weights == "device" and not self._is_unified:
                state_bytes = numel * sizes.moved
            else:
                state_bytes = numel * sizes.state
            add(tier, "optimizer state", state_bytes)
            if self._job.gradients_wait:  # otherwise they go straight into the update
                home = "host" if tier == "disk" else tier
                add(home, "gradients", numel * sizes.gradient)
            elif tier != "device":
                is_piece = "disk" in (tier, weights)
                chunk = self.units.largest_piece if is_piece else self.units.chunk_of(unit)
                ring_chunk = max(ring_chunk, chunk)
            if tier == "host":
                visiting_chunk = max(visiting_chunk, self.units.chunk_of(unit))
            stages = stages or tier == "disk"
            has_pieces = has_pieces or "disk" in (tier, weights)
            with_masters = with_masters or (tier == "disk" and weights == "device")
        if ring_chunk:
            num_buffers = num_ring_buffers(ring_chunk, on_disk=has_pieces)
            add("host", "gradients", num_buffers * ring_chunk * sizes.gradient)
        if stages:
            add(
                "host",
                "disk staging",
                self.units.state_staging_bytes(sizes, with_masters=with_masters),
            )
        for index, numel in self.units.lodging(placement).items():
            is_resident = self.units.weights_tier(placement, index) == "device"
            lodged = sizes.state + (0 if is_resident else sizes.weight) + sizes.gradient
            add("device", "lodged state", numel * lodged)
        visit = visiting_chunk * (sizes.moved + sizes.gradient)
        add("device", "state visits", placement.num_helping * visit)

    def _add_activations(self, placement: Placement, add: _Add) -> None:
        offloaded = [
            num_bytes
            for num_bytes, block in zip(self._inputs, placement.blocks, strict=True)
            if block.activations == "offload"
        ]
        add("host", "block inputs", sum(offloaded))
        add("device", WORKING_MEMORY, sum(sorted(offloaded)[-_OFFLOADED_INPUTS:]))
        add("device", "block inputs", self._num_norms * self._stream_bytes)
        for i, block in enumerate(placement.blocks):
            if block.activations == "recompute":
                add("device", "block inputs", self._inputs[i])
            elif block.activations == "keep":
                add("device", "kept activations", self._kept[i])
        keeps = tuple(block.activations == "keep" for block in placement.blocks)
        add("device", WORKING_MEMORY, self.working_bytes(keeps, offloads=bool(offloaded)))

    @property
    def checkpoint_staging_bytes(self) -> int:
        """Return what a copy of all weights that are trained, and of their state, takes."""
        numel = sum(unit.trainable_numel for unit in self.units.units)
        return int(numel * self._bytes.moved) if self._job.checkpoints else 0

    def kept_bytes(self, block: int) -> int:
        """Return what keeping a block's activations takes beyond its input."""
        return self._kept[block] - self._inputs[block]

    def largest_kept_bytes(self, placement: Placement) -> int | None:
        """Return the most that one block keeps, with its input; None if none does."""
        pairs = zip(self._kept, placement.blocks, strict=True)
        return max((n for n, block in pairs if block.activations == "keep"), default=None)

    def _kept_per_token(self, block: BlockSpec) -> float:
        kept = block.kept_bytes_per_token(
            self._job.dtype, is_compiled=self._is_gpu, saves_little=self._saves_little
        )
        return kept + self._in_attention_per_token(block)

    def _graph_per_token(self, block: BlockSpec) -> float:
        graph = block.graph_bytes_per_token(self._job.dtype, is_compiled=self._is_gpu)
        return graph + self._in_attention_per_token(block)

    def _in_attention_per_token(self, block: BlockSpec) -> float:
        if block.attention is None:
            return 0.0
        return block.attention.kept_bytes(
            self._job.seq_len,
            self._job.dtype,
            is_masked=self._job.is_masked,
            is_compiled=self._is_gpu,
        )

    def working_bytes(self, keeps: Sequence[bool], *, offloads: bool = False) -> int:
        """Return what a step makes on the way, if these blocks keep their activations.

        ``offloads``: other blocks' inputs wait on the host.
        """
        # The hidden states after the last block and their gradient are there throughout.
        always = 2 * self._stream_bytes + self._mask_bytes
        if self._is_gpu:
            in_blocks = float((self._graph_bytes + self._beside_bytes).max())
            most = max(in_blocks, self._loss_bytes()) + always
            return int(max(most, self._at_widest(keeps, offloads)) + WORKSPACE_BYTES)
        in_blocks = self._in_turn(keeps, self._graph_bytes, self._beside_bytes)
        return int(max(in_blocks, self._loss_bytes()) + always + self._batch_bytes())

    def _at_widest(self, keeps: Sequence[bool], offloads: bool) -> float:
        """Return the same at the widest layer of a compiled backward: what long sequences need.

        The gradient of the block's output is there, and of its input where that comes in parts. By
        then the last norm has let its input go, and no offloaded input is on its way to the host.
        """
        num_streams = 1 + self._is_split - min(1, self._num_norms)
        gone = max(self._inputs) if offloads else 0
        in_blocks = self._in_turn(keeps, self._saved_bytes, self._derivative_bytes)
        return in_blocks + num_streams * self._stream_bytes + self._mask_bytes - gone

    def _in_turn(self, keeps: Sequence[bool], graphs: _Sizes, besides: _Sizes) -> float:
        """Return the most beside what is kept, where each block's graph goes as it is used.

        A block that keeps has its graph already, and those after it have left by then.
        """
        kept = np.where(keeps, self._kept_beyond_inputs, 0.0)
        gone = kept[::-1].cumsum()[::-1] - kept  # with the blocks after each
        return max(0.0, float((besides + np.where(keeps, 0.0, graphs) - gone).max()))

    @cached_property
    def _kept_beyond_inputs(self) -> _Sizes:
        return np.array([self.kept_bytes(i) for i in range(len(self._kept))], dtype=np.float64)

    @cached_property
    def _saved_bytes(self) -> _Sizes:
        """What the forward of one micro-batch saves, block by block."""
        rows = self._rows_at_once
        return np.array(
            [rows * self._kept_per_token(b) + self._adapted_bytes(b) for b in self._spec.blocks]
        )

    @cached_property
    def _derivative_bytes(self) -> _Sizes:
        """What is there beside that at the widest layer, block by block."""
        dtype, little = self._job.dtype, self._saves_little
        each = [
            block.derivative_bytes_per_token(dtype, saves_little=little)
            for block in self._spec.blocks
        ]
        return self._rows_at_once * np.array(each)

    @cached_property
    def _graph_bytes(self) -> _Sizes:
        """What the backward of one micro-batch reads, block by block."""
        rows = self._rows_at_once
        return np.array(
            [rows * self._graph_per_token(b) + self._adapted_bytes(b) for b in self._spec.blocks]
        )

    def _adapted_bytes(self, block: BlockSpec) -> int:
        """Experts' matrices with their adapters added, which each micro-batch makes and saves."""
        return sum(block.adapted_stacks) * self._bytes.weight

    @cached_property
    def _beside_bytes(self) -> _Sizes:
        """What is there beside that while it is differentiated, block by block."""
        return np.array(
            [
                self._rows_at_once * self._beside_per_token(block)
                + block.trainable_parameters * self._bytes.gradient
                + max(block.adapted_stacks, default=0) * self._bytes.weight  # the sum's gradient
                for block in self._spec.blocks
            ]
        )

    def _beside_per_token(self, block: BlockSpec) -> float:
        job, is_compiled = self._job, self._is_gpu
        gradients = block.gradient_bytes_per_token(job.dtype, is_compiled=is_compiled)
        if block.attention is None:
            return gradients
        in_attention = block.attention.working_bytes(
            job.seq_len, job.dtype, is_masked=job.is_masked, is_compiled=is_compiled
        )
        return max(gradients, in_attention)  # the widest layer is not attention's

    def _batch_bytes(self) -> int:
        """The batch itself: four numbers for a token, and the tables of its positions.

        A GPU's working memory was measured with these in it.
        """
        tables = {
            block.attention.window: block.attention.table_bytes(self._job.dtype)
            for block in self._spec.blocks
            if block.attention is not None
        }
        return self._tokens * (4 * 8 + sum(tables.values()))

    def _loss_bytes(self) -> float:
        """A chunk of logits and what comes of them; the head's gradient in fp32 if it is trained.

        Compiled, that is the logits' gradient. Otherwise also their logarithms, and the gradient
        of these.
        """
        spec = self._spec
        if not spec.vocabulary:
            return 0.0
        rows = min(self._tokens, chunk_rows(self._tokens, spec.vocabulary, spec.hidden_size))
        num_logits = rows * spec.vocabulary * (2 if self._is_gpu else 4)
        is_trained = any(edge.trainable_numel for edge in spec.edges)
        head = 4 * spec.head_parameters if is_trained else 0
        return float(num_logits * BYTES_OF[self._job.dtype] + head)

    @cached_property
    def _mask_bytes(self) -> int:
        """Masks of the whole batch: one for all blocks that see the same keys."""
        job = self._job
        masks = {
            block.attention.window: block.attention.mask_bytes(
                job.seq_len, job.dtype, is_masked=job.is_masked
            )
            for block in self._spec.blocks
            if block.attention is not None
        }
        return self._tokens * sum(masks.values())


def totals(tiers: TierBytes) -> dict[str, int]:
    return {tier: sum(purposes.values()) for tier, purposes in tiers.items()}


def missing_bytes(tiers: TierBytes, limits: dict[str, int]) -> dict[str, int]:
    """Return by how much each tier that does not fit exceeds its limit."""
    over = {tier: num_bytes - limits[tier] for tier, num_bytes in totals(tiers).items()}
    return {tier: num_bytes for tier, num_bytes in over.items() if num_bytes > 0}
