"""How many sequences a block works on at a time: one rule, for the engine and for plans."""

from __future__ import annotations

TARGET_TOKENS = {"cuda": 16384, "cpu": 2048}


def pick_micro_batch(sequences: int, seq_len: int, *, device_type: str = "cuda") -> int:
    """Return the number of sequences: near the target of tokens, in equal micro-batches.

    It depends on nothing but the batch's shape, so that every placement computes the same bits.
    """
    target = max(1, TARGET_TOKENS.get(device_type, TARGET_TOKENS["cuda"]) // seq_len)
    if target >= sequences:
        return sequences
    divisors = [size for size in range(1, target + 1) if sequences % size == 0]
    if 2 * divisors[-1] > target:
        return divisors[-1]
    count = -(-sequences // target)
    return -(-sequences // count)
