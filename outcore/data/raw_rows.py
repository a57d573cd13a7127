"""What the readers hand on: rows as they lie in a file, in batches, not yet understood."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_ROW_BYTES = 64 << 20  # of one line, or of one element of a JSON array
_BATCH_ROWS = 256
_BATCH_BYTES = 1 << 20


class RowFault(ValueError):
    """What is wrong with a row; whoever knows its place makes a BadRow of it."""


@dataclass(frozen=True)
class Unreadable:
    """Stands where a row should be."""

    why: str


@dataclass(frozen=True)
class RawRow:
    """A row of JSON as bytes, a row of a table as a dict, or a part of a text file as text."""

    line: int  # from 1
    value: bytes | str | dict[str, Any] | Unreadable
    # A text file that is long comes in parts, which are joined again after tokenising.
    starts_document: bool = True
    ends_document: bool = True


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Rows of one file that follow each other."""

    path: str
    rows: tuple[RawRow, ...]
    num_bytes: int  # of the file, that these rows took
    other_columns: tuple[str, ...] = ()  # of a table, that were not read: their names, not all


def in_batches(path: str, rows: Iterable[tuple[RawRow, int]]) -> Iterator[RawBatch]:
    """Gather rows, each with the bytes that it took of its file.

    Where one batch ends depends on the rows alone, never on who will work on them.
    """
    gathered: list[RawRow] = []
    num_bytes = 0
    for row, row_bytes in rows:
        gathered.append(row)
        num_bytes += row_bytes
        if len(gathered) >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield RawBatch(path=path, rows=tuple(gathered), num_bytes=num_bytes)
            gathered, num_bytes = [], 0
    if gathered:
        yield RawBatch(path=path, rows=tuple(gathered), num_bytes=num_bytes)
