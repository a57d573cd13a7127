"""What a manifest says of each file and tensor of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor's place in its file; ``num_pages`` whole pages, the last one padded with zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    num_pages: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file; ``header`` is the checksum of the pages before the first tensor."""

    name: str
    num_bytes: int
    header: int
    tensors: tuple[Entry, ...]
