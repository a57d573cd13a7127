"""A unit: the parameters of one block or edge, moving as one flat span.

Its weights and its optimizer state each have a home: device, host or disk. State on the
host keeps the master weights there; a unit whose weights live on the device then has both, and the
update refreshes the device's. ``pending`` are the updates in flight: nothing may read the weights
before them.

A unit's span is its plain parameters, as ``layout`` says, and behind them the bytes of frozen
matrices that are kept in 8 or 4 bit. It moves as one tensor of the plain type, whatever its bytes
mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outcore.blocks import Part
from outcore.store.packed_spans import PackedLayout
from outcore.store.spans import SpanLayout
from outcore.stream.disk_tensors import DiskTensor, piece_numel
from outcore.stream.lanes import Fence


@dataclass(kw_only=True, eq=False)
class Unit:
    index: int
    part: Part
    arrives_whole: bool  # its gradient comes in one piece, not parameter by parameter
    layout: SpanLayout  # of its plain parameters
    dtype: torch.dtype
    packed: PackedLayout | None = None  # of its frozen matrices in 8 or 4 bit
    first_element: int = 0  # of its trainable prefix among all units'
    is_urgent: bool = False  # a forward begins with it: the first block, or an edge before it
    weights_home: str = "host"
    state_home: str = "host"
    host_weight: Tensor | None = None  # flat, the whole span
    device_weight: Tensor | None = None  # flat, the whole span
    disk_weight: DiskTensor | None = None  # then host_weight is its mapped view
    remainder: Tensor | None = None  # flat, the trainable prefix: what bf16 rounded away
    version: int = 0
    pending: list[Fence] = field(default_factory=list)

    @property
    def is_on_disk(self) -> bool:
        """Whether an update of the unit goes through the disk."""
        return "disk" in (self.weights_home, self.state_home)

    def piece_numel(self, max_numel: int) -> int:
        """Return how many elements of a unit on disk travel together; a chunk is one piece."""
        return piece_numel(self.layout.trainable_numel or self.span_numel, max_numel)

    @property
    def span_numel(self) -> int:
        """Elements of the whole span: what a slot takes, and a copy moves."""
        if self.packed is None:
            return self.layout.numel
        return self.layout.numel + self.packed.num_bytes // self.dtype.itemsize

    def packed_span(self, flat: Tensor) -> Tensor:
        """Return the bytes of the packed matrices in ``flat``, which holds the whole span."""
        return flat[self.layout.numel : self.span_numel].view(torch.uint8)

    @property
    def home(self) -> Tensor:
        """The span where it lives between uses."""
        home = self.host_weight if self.host_weight is not None else self.device_weight
        assert home is not None
        return home

    @property
    def name(self) -> str:
        return self.part.name or "(root)"

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self.part.parameters

    def full_name(self, field_name: str) -> str:
        return f"{self.part.name}.{field_name}" if self.part.name else field_name

    def update_queued(self, fences: list[Fence]) -> None:
        """Say that ``fences`` are about to change the weights; copies made before are stale."""
        self.pending = fences  # first: another thread's copy takes the version, then the fences
        self.version += 1

    def before_compute(self) -> None:
        """Make what is launched next wait for the updates of the resident weights."""
        for fence in self.pending:
            fence.before_compute()

    def block_until_updated(self) -> None:
        for fence in self.pending:
            fence.block()
        self.pending = []
