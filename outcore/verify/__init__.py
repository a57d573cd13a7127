"""Proof on the user's own model and machine: every placement trains to the same bits."""

from outcore.verify.exactness import (
    Comparison,
    VerifyJob,
    compare_with_plain_torch,
    placements,
    verify,
)

__all__ = ["Comparison", "VerifyJob", "compare_with_plain_torch", "placements", "verify"]
