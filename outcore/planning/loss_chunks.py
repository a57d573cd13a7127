"""How many rows of logits exist at a time: the engine cuts so, and a plan counts with it."""

from __future__ import annotations

import math

MOST_LOGITS = 1 << 28
LEAST_LOGITS = 1 << 22


def chunk_rows(num_rows: int, vocabulary: int, hidden_size: int) -> int:
    """Return the rows of a chunk: equal chunks, few enough logits, a multiple of 64.

    A chunk takes about what the head does, so that a small model fits a small budget. Budgets
    themselves decide nothing here: they would change the order of additions.
    """
    logits = min(MOST_LOGITS, max(LEAST_LOGITS, vocabulary * hidden_size))
    most = max(64, logits // vocabulary)
    count = max(1, math.ceil(num_rows / most))
    return max(64, math.ceil(math.ceil(num_rows / count) / 64) * 64)
