"""JSON from outside, read into memory that is bounded before any of it is taken.

A value of three bytes may take a hundred as an object of Python, so that the size of a file says
little: what it would take is counted first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcore.units import format_bytes

MOST_MEMORY_BYTES = 170 << 20  # the header of 100,000 tensors
# What each mark brings at most, by measurement: a table, a list, another value, a name and its own.
_BYTES_OF = {b"{": 160, b"[": 80, b",": 80, b":": 130}

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def most_text(most_bytes: int = MOST_MEMORY_BYTES) -> int:
    """Return how long a text can be whose values take no more memory than this."""
    return most_bytes // 3


def read_limited(
    path: Path, *, most_bytes: int = MOST_MEMORY_BYTES, pairs_hook: PairsHook | None = None
) -> Any:
    """Return what a file says, as ``parse_limited``; OSError for what cannot be read."""
    with path.open("rb") as file:
        data = file.read(most_text(most_bytes) + 1)
    return parse_limited(data, most_bytes=most_bytes, pairs_hook=pairs_hook)


def parse_limited(
    data: bytes, *, most_bytes: int = MOST_MEMORY_BYTES, pairs_hook: PairsHook | None = None
) -> Any:
    """Return what ``data`` says; ValueError or RecursionError for what is no JSON, or too much."""
    if memory_of(data) > most_bytes:
        raise ValueError(f"it would take more than {format_bytes(most_bytes)} of memory")
    return json.loads(data, object_pairs_hook=pairs_hook)


def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table of pairs; ValueError for a name of which the second would silently win."""
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice!r} stands in it twice")
    return table


def memory_of(data: bytes) -> int:
    """Return the most that parsing ``data`` can take, and a little more."""
    # One character beyond ASCII makes four bytes of each in its string, or in the whole text.
    width = 1 if data.isascii() and b"\\u" not in data else 4
    marks = sum(data.count(mark) * size for mark, size in _BYTES_OF.items())
    return len(data) + 2 * width * len(data) + marks  # bytes, text, the longest string in it
