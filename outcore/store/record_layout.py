"""Where the records of a scratch file lie: one behind the other, each on whole pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outcore.kernels.checksum import PAGE_BYTES


def page_aligned_bytes(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, kw_only=True)
class Record:
    """A span of one unit's weights or state: ``num_bytes`` at ``offset``, both in whole pages."""

    index: int
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """All records of a file. ``num_bytes`` is what the file takes."""

    records: tuple[Record, ...]
    num_bytes: int

    @classmethod
    def of(cls, sizes_bytes: Iterable[int]) -> RecordLayout:
        """Lay out records of at least these sizes, each rounded up to whole pages."""
        records = []
        offset = 0
        for index, size_bytes in enumerate(sizes_bytes):
            if size_bytes <= 0:
                raise ValueError(f"record {index} must have more than 0 bytes, not {size_bytes}")
            record = Record(index=index, offset=offset, num_bytes=page_aligned_bytes(size_bytes))
            records.append(record)
            offset = record.end
        if not records:
            raise ValueError("a scratch file needs at least one record")
        return cls(records=tuple(records), num_bytes=offset)

    @property
    def largest_bytes(self) -> int:
        return max(record.num_bytes for record in self.records)
