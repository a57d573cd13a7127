"""How much of a device budget can be filled: what an allocator rounds and breaks off is the rest.

A GPU's allocator maps memory in pages of 20 MiB, for each stream its own, and what is free in one
of them serves no other. Of a small budget that is more than a share of it.
"""

from __future__ import annotations

SHARE = 0.03
GPU_BYTES = 80 << 20  # four of those pages
GPU_MOST = 1 / 6  # of a budget


def fillable_bytes(budget_bytes: int, *, is_gpu: bool) -> int:
    """Return what can be planned for."""
    slack = SHARE * budget_bytes
    if is_gpu:
        slack = max(slack, min(GPU_BYTES, GPU_MOST * budget_bytes))
    return int(budget_bytes - slack)


def budget_to_fill(num_bytes: int, *, is_gpu: bool) -> int:
    """Return a budget of which so much can be filled."""
    budget = num_bytes / (1 - SHARE)
    if is_gpu:
        budget = max(budget, min(num_bytes + GPU_BYTES, num_bytes / (1 - GPU_MOST)))
    return int(budget) + 2
