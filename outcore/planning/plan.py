"""The plan: an immutable value that says where everything lives, and what a step will cost.

``Job`` is what is asked for, ``Plan`` the answer. Both are plain values (plan_json.py writes and
reads them); nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outcore.timeline import LANES, Span

# Purposes: a copy of all state, while it is written; what a step makes on the way.
CHECKPOINT_STAGING = "checkpoint staging"
WORKING_MEMORY = "working memory"

__all__ = [
    "CHECKPOINT_STAGING",
    "LANES",
    "WORKING_MEMORY",
    "Activations",
    "BlockPlan",
    "Budgets",
    "Job",
    "Plan",
    "Prediction",
    "Span",
]

Tier = Literal["device", "host", "disk"]
Activations = Literal["keep", "recompute", "offload"]
"""keep: all that the backward needs stays on the device. recompute: only the block's input does.
offload: recompute, and the input waits on the host."""

StateFormat = Literal["fp32", "compact", "minimal"]
Clipping = Literal["waiting", "two-pass", "none"]
"""To the norm of all gradients: they wait for it, or a first pass over the batch finds it."""
FrozenWeights = Literal["int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that the plan may use; the probe's or catalogue's free memory if None."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    disk_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step of training, as asked for."""

    tokens: int  # a step
    seq_len: int
    clipping: Clipping = "waiting"
    dtype: Literal["bf16", "fp32"] = "bf16"
    state_format: StateFormat = "fp32"
    frozen_weights: FrozenWeights | None = None  # frozen matrices in 8 or 4 bit
    micro_batch: int | None = None  # sequences inside a block; None: as the engine picks
    budgets: Budgets = Budgets()
    objective: Literal["speed", "memory"] = "speed"
    is_masked: bool = False  # sequences hold several documents, or padding
    checkpoints: bool = False  # written while training goes on, if the host has memory for a copy

    @property
    def gradients_wait(self) -> bool:
        """Whether updates begin after the whole backward, not during it."""
        return self.clipping == "waiting"

    @property
    def num_passes(self) -> int:
        """Forwards and backwards of a step."""
        return 2 if self.clipping == "two-pass" else 1

    @property
    def sequences(self) -> int:
        return self.tokens // self.seq_len


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Where one block's tensors live between uses, and what happens to its activations.

    A gradient that waits for clipping waits where the state lives, on the host for the disk's.
    """

    weights: Tier
    state: Tier
    activations: Activations


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The simulated step."""

    step_s: float
    tokens_per_s: float
    tflops: float
    busy_s: dict[str, float]  # by lane
    binding_lane: str
    hiding_tokens: int | None  # tokens a step from which compute binds; None: never does
    timeline: tuple[Span, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the engine needs to know before it allocates a byte."""

    model: str
    machine: str
    job: Job
    blocks: tuple[BlockPlan, ...]
    edge_state: Tier  # edges' weights are always on the device
    micro_batch: int
    num_slots: int
    num_visits: int  # chunks with buffers on the device: lodged first, two to help the host
    peak_bytes: dict[str, dict[str, int]] = field(default_factory=dict)  # tier, purpose
    # What the plan was made for: a model with other numbers is refused. Empty, None: not known.
    block_parameters: tuple[int, ...] = ()
    hidden_size: int | None = None
    largest_kept_bytes: int | None = None  # of one block that keeps its activations
    prediction: Prediction

    @property
    def kept_block_bytes(self) -> int | None:
        """What a block that keeps its activations holds at most; None if none does.

        The mean, where the largest is not known.
        """
        if self.largest_kept_bytes is not None:
            return self.largest_kept_bytes
        num_kept = sum(block.activations == "keep" for block in self.blocks)
        kept = self.peak_bytes.get("device", {}).get("kept activations")
        return kept // num_kept if kept and num_kept else None

    @property
    def stages_checkpoints(self) -> bool:
        """Whether checkpoints are written while training goes on; if not, training waits."""
        return any(CHECKPOINT_STAGING in purposes for purposes in self.peak_bytes.values())

    def tier_bytes(self, tier: str) -> int:
        return sum(self.peak_bytes.get(tier, {}).values())
