"""The header of a safetensors file, read with limits before any library sees the file.

The library checks offsets, sizes and types. What it lets pass is refused here: a name that stands
twice, of which the second would silently win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.errors import StoreError
from outcore.limited_json import most_text, no_name_twice, parse_limited

_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True)
class Header:
    """Name → entry, without the metadata, and the byte of the file that offsets count from."""

    entries: dict[str, Any]
    data_start: int


def read_header(path: Path) -> Header:
    """Return what a file says that it holds; StoreError says what is wrong."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start and _GIT_LFS.startswith(start):
                raise _wrong(path, "it is a pointer of git-lfs; `git lfs pull` brings the file")
            if not 2 <= length <= size - 8:
                raise _wrong(path, f"its header would have {length} bytes, the file has {size}")
            if length > most_text():
                raise _wrong(path, f"its header of {length} bytes is no table of tensors")
            header = parse_limited(file.read(length), pairs_hook=no_name_twice)
    except StoreError:  # is an OSError too
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"its header is no JSON of a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise _wrong(path, "its header is no table of tensors")
    header.pop("__metadata__", None)
    return Header(entries=header, data_start=8 + length)


def num_elements(entries: dict[str, Any]) -> int:
    """Return the elements of all tensors that a header names; what is malformed counts as 0."""
    total = 0
    for entry in entries.values():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape):
            total += math.prod(shape)
    return total


def _wrong(path: Path, what: str) -> StoreError:
    return StoreError(f"{path}: not a safetensors file: {what}", path=path)
