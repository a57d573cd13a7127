"""A placement: everything that a plan decides, before its cost is known.

Also the engine's units and chunks as numbers: which optimizer state lodges on the device, and how
large the buffers are that state and gradients pass through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outcore.model_spec import ModelSpec
from outcore.optim.backend import MAX_CHUNK_ELEMENTS
from outcore.optim.device_state import NUM_HELPING
from outcore.optim.disk_updater import NUM_STAGED, NUM_STAGED_WEIGHTS
from outcore.optim.state_format import max_piece_elements
from outcore.planning.plan import BlockPlan, Job, Tier
from outcore.planning.state_bytes import StateBytes
from outcore.store.record_layout import page_aligned_bytes
from outcore.store.spans import ALIGN_ELEMENTS
from outcore.stream.disk_tensors import piece_numel


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The decisions of a plan."""

    blocks: tuple[BlockPlan, ...]
    edge_state: Tier
    micro_batch: int
    num_slots: int
    num_visits: int

    @property
    def num_helping(self) -> int:
        return max(0, min(NUM_HELPING, self.num_visits - 1))

    @property
    def num_lodged(self) -> int:
        return self.num_visits - self.num_helping


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """A block or edge in the order of definition; ``block`` is None for an edge."""

    block: int | None
    edge: int | None
    numel: int
    trainable_numel: int
    deliveries: tuple[int, ...]


class Units:
    """A model's units, and their chunks; the same for every placement."""

    def __init__(self, spec: ModelSpec, job: Job) -> None:
        self.units = tuple(_units(spec, job))
        self._max_piece = max_piece_elements(job.state_format)
        self.block_chunk = self._largest_chunk([u for u in self.units if u.block is not None])
        self.edge_chunk = self._largest_chunk([u for u in self.units if u.block is None])
        self.max_chunk = max(1, self.block_chunk, self.edge_chunk)

    @cached_property
    def first_edges(self) -> tuple[int, ...]:
        """Units that a forward needs before the first block."""
        first = next(i for i, unit in enumerate(self.units) if unit.block is not None)
        return tuple(range(first))

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """The (unit, elements) of each chunk of the first units, in the order of the forward."""
        limit = self._limit()
        return tuple(
            (index, numel)
            for index, unit in enumerate(self.units[: len(self.first_edges) + 1])
            for numel in _cut(unit.deliveries, limit)
        )

    def lodging(self, placement: Placement) -> dict[int, int]:
        """Return how many elements of each unit's state lodge on the device.

        In the order of the forward, of the state whose home is the host.
        """
        lodged: dict[int, int] = {}
        left, limit = placement.num_lodged, self._limit()
        for index, unit in enumerate(self.units):
            if not left:
                break
            if self.state_tier(placement, index) == "host":
                chunks = _cut(unit.deliveries, limit)[:left]
                left -= len(chunks)
                if chunks:
                    lodged[index] = sum(chunks)
        return lodged

    @cached_property
    def largest_piece(self) -> int:
        """Elements of a chunk on disk; only blocks go there."""
        blocks = [unit for unit in self.units if unit.block is not None]
        pieces = [
            min(numel, piece_numel(numel, self._max_piece))
            for numel in {unit.trainable_numel or unit.numel for unit in blocks}
        ]
        return max(pieces, default=0)

    @property
    def staged_numel(self) -> int:
        """Elements of state that are on their way through the disk at a time."""
        return NUM_STAGED * self.largest_piece

    def chunk_of(self, unit: UnitSize) -> int:
        """Return the elements of the largest chunk of units of this kind."""
        return self.edge_chunk if unit.block is None else self.block_chunk

    def state_staging_bytes(self, sizes: StateBytes, *, with_masters: bool) -> int:
        """Return the host memory that state passes through on its way from and to disk.

        ``with_masters``: some of it has the master of a resident weight beside it.
        """
        return NUM_STAGED * sizes.state_on_disk(self.largest_piece, with_master=with_masters)

    def weight_staging_bytes(self, sizes: StateBytes) -> int:
        """Return the same for weights, whose span may be longer than what is trained of it."""
        blocks = [unit for unit in self.units if unit.block is not None]
        pieces = [
            min(unit.numel, piece_numel(unit.trainable_numel or unit.numel, self._max_piece))
            for unit in blocks
        ]
        return NUM_STAGED_WEIGHTS * page_aligned_bytes(max(pieces, default=0) * sizes.weight)

    def first_chunk(self, unit: int) -> int:
        return next(iter(_cut(self.units[unit].deliveries, self._limit())), 0)

    def state_tier(self, placement: Placement, unit: int) -> Tier:
        block = self.units[unit].block
        return placement.edge_state if block is None else placement.blocks[block].state

    def weights_tier(self, placement: Placement, unit: int) -> Tier:
        block = self.units[unit].block
        return "device" if block is None else placement.blocks[block].weights

    def _limit(self) -> int:
        largest = max((unit.trainable_numel for unit in self.units), default=1)
        return min(MAX_CHUNK_ELEMENTS, max(1 << 10, largest // 3))

    def _largest_chunk(self, units: Sequence[UnitSize]) -> int:
        limit = self._limit()
        cuts = {n for unit in units for n in set(unit.deliveries) if n}
        return max((max(_cut((n,), limit)) for n in cuts), default=0)


def _units(spec: ModelSpec, job: Job) -> list[UnitSize]:
    units: list[UnitSize] = []
    edges = list(enumerate(spec.edges))
    for position in range(len(spec.blocks) + 1):
        units += [
            UnitSize(
                block=None,
                edge=i,
                numel=edge.numel,
                trainable_numel=edge.trainable_numel,
                deliveries=edge.deliveries,
            )
            for i, edge in edges
            if edge.num_blocks_before == position
        ]
        if position < len(spec.blocks):
            block = spec.blocks[position]
            units.append(
                UnitSize(
                    block=position,
                    edge=None,
                    numel=block.span_numel(job.dtype, job.frozen_weights),
                    trainable_numel=block.trainable_numel,
                    deliveries=(block.trainable_numel,) if block.trainable_numel else (),
                )
            )
    return units


def _cut(deliveries: Sequence[int], limit: int) -> list[int]:
    """Cut what arrives together into chunks of about equal size, as the engine does."""
    sizes: list[int] = []
    for numel in deliveries:
        pieces = max(1, -(-numel // limit))
        size = -(-numel // pieces)
        size = -(-size // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        sizes += [min(size, numel - start) for start in range(0, numel, size)]
    return sizes
