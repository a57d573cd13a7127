"""What a run tells about itself: one value a step, and one at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outcore.store.ledger import TierReport
from outcore.views.side_by_side import Measurement


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One optimizer step, told one step late."""

    step: int  # how many are done
    num_steps: int
    loss: float
    grad_norm: float | None
    lr: float
    step_s: float
    tokens_per_s: float
    tflops: float
    data_wait_s: float  # how long the step waited for its batch
    epoch: float
    more: dict[str, float] = field(default_factory=dict)  # what the objective tells beside the loss


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    output: Path
    step: int
    num_steps: int
    stopped_by: str | None  # a signal's name, if one ended it, or its last evaluation
    is_resumable: bool  # whether a checkpoint of this step was written, or the reference so far
    loss: float | None  # of the last step
    eval_loss: float | None
    seconds: float
    tiers: tuple[TierReport, ...]
    unmeasured_bytes: int  # of the device, as planned: temporaries, which only a GPU counts
    measurement: Measurement | None
    is_prepared: bool = True  # False: stopped in what this process had to do before its first step

    @property
    def device_peak_bytes(self) -> int:
        """The most that the device held at a time, temporaries included."""
        held = next(tier.peak_bytes for tier in self.tiers if tier.tier == "device")
        return held + self.unmeasured_bytes

    @property
    def is_complete(self) -> bool:
        return self.is_prepared and self.step >= self.num_steps
