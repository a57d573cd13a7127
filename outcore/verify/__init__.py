"""Proof on the user's own model and machine: every placement trains to the same bits."""

from outcore.verify.exactness import (
    RESIDENT,
    Comparison,
    Placement,
    TrainedRun,
    VerifyJob,
    compare,
    disk_placements,
    placements,
    train,
    verify,
)
from outcore.verify.model_source import ModelSource, find_model
from outcore.verify.plain_torch import (
    PlainTorchComparison,
    check_against_plain_torch,
    compare_with_plain_torch,
)

__all__ = [
    "RESIDENT",
    "Comparison",
    "ModelSource",
    "Placement",
    "PlainTorchComparison",
    "TrainedRun",
    "VerifyJob",
    "check_against_plain_torch",
    "compare",
    "compare_with_plain_torch",
    "disk_placements",
    "find_model",
    "placements",
    "train",
    "verify",
]
