"""How many rows of logits exist at a time: the engine cuts so, and a plan counts with it."""

from __future__ import annotations

import math

MOST_LOGITS = 5 << 26  # 2,048 rows of a vocabulary of 152,064
LEAST_LOGITS = 1 << 22


def chunk_rows(num_rows: int, vocabulary: int, hidden_size: int) -> int:
    """Return the rows of a chunk: equal chunks if they can be, few enough logits, a multiple of 64.

    A last chunk of fewer rows is compiled by itself, which takes seconds of the first step. A chunk
    takes about what the head does, so that a small model fits a small budget. Budgets themselves
    decide nothing here: they would change the order of additions.
    """
    logits = min(MOST_LOGITS, max(LEAST_LOGITS, vocabulary * hidden_size))
    most = max(1, logits // vocabulary // 64) * 64
    if num_rows > most:
        equal = [rows for rows in range(64, most + 1, 64) if num_rows % rows == 0]
        if equal and 2 * equal[-1] > most:
            return equal[-1]
    count = max(1, math.ceil(num_rows / most))
    return max(64, math.ceil(math.ceil(num_rows / count) / 64) * 64)
