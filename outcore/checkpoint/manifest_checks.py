"""What a manifest says of its files, checked before any of them is opened.

Names stay inside the directory, and tensors lie one behind the other on pages of their own, as the
writer lays them out: nothing overlaps, no size is larger than the file's, and memory is taken only
for sizes that are bounded here.
"""

from __future__ import annotations

import math
import re
from typing import Any

from outcore.checkpoint.entries import Entry, FileEntry
from outcore.checkpoint.tensor_types import DTYPES
from outcore.kernels.checksum import PAGE_BYTES

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,60}\.safetensors")
_MOST_HEADER_BYTES = 256 << 20
_MOST_BYTES = 1 << 60
_MOST_DIMENSIONS = 16
_MOST_NAME = 4096


def checked_files(data: Any) -> tuple[FileEntry, ...]:
    """Return the files of a manifest; ValueError says which is wrong, and how."""
    if not isinstance(data, list):
        raise ValueError("has no list of files")
    files = tuple(_file(each) for each in data)
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        raise ValueError("names a file twice")
    tensors = [(file.name, entry.name) for file in files for entry in file.tensors]
    if len(set(tensors)) != len(tensors):
        raise ValueError("names a tensor twice")
    return files


def _file(data: Any) -> FileEntry:
    _check_keys(data, FileEntry, "a file")
    name = data["name"]
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"names a file {_short(name)}, which is none of a checkpoint's")
    if not isinstance(data["tensors"], list):
        raise ValueError(f"has no list of tensors for {name}")
    tensors = tuple(_entry(each, name) for each in data["tensors"])
    num_bytes = _whole(data["num_bytes"], f"{name}: num_bytes")
    position = tensors[0].offset if tensors else num_bytes
    if not PAGE_BYTES <= position <= _MOST_HEADER_BYTES or position % PAGE_BYTES:
        raise ValueError(f"gives {name} a header of {position} bytes")
    for entry in tensors:
        if entry.offset != position:
            raise ValueError(
                f"has {_short(entry.name)} at {entry.offset} of {name}, where {position} is next: "
                "tensors overlap or leave a hole"
            )
        position += entry.num_pages * PAGE_BYTES
    if position != num_bytes:
        raise ValueError(f"gives {name} {num_bytes} bytes, and its tensors end at {position}")
    header = _whole(data["header"], f"{name}: header", 2**64 - 1)
    return FileEntry(name=name, num_bytes=num_bytes, header=header, tensors=tensors)


def _entry(data: Any, file: str) -> Entry:
    _check_keys(data, Entry, f"a tensor of {file}")
    name, dtype, shape = data["name"], data["dtype"], data["shape"]
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
        raise ValueError(f"names a tensor of {file} {_short(name)}")
    where = f"{file}: {_short(name)}"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"gives {where} the type {_short(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"gives {where} the shape {_short(shape)}")
    sizes = tuple(_whole(size, f"{where}: shape") for size in shape)
    if math.prod(size or 1 for size in sizes) > _MOST_BYTES:  # an empty one has strides too
        raise ValueError(f"gives {where} the shape {_short(shape)}")
    num_bytes = _whole(data["num_bytes"], f"{where}: num_bytes")
    if num_bytes != math.prod(sizes) * DTYPES[dtype].itemsize:
        raise ValueError(f"gives {where} {num_bytes} bytes, not those of {dtype}{list(sizes)}")
    num_pages = _whole(data["num_pages"], f"{where}: num_pages")
    if num_pages != -(-num_bytes // PAGE_BYTES):
        raise ValueError(f"gives {where} {num_pages} pages for {num_bytes} bytes")
    return Entry(
        name=name,
        dtype=dtype,
        shape=sizes,
        offset=_whole(data["offset"], f"{where}: offset"),
        num_bytes=num_bytes,
        num_pages=num_pages,
        checksum=_whole(data["checksum"], f"{where}: checksum", 2**64 - 1),
    )


def _check_keys(data: Any, kind: type[Entry] | type[FileEntry], what: str) -> None:
    if not isinstance(data, dict) or data.keys() != kind.__dataclass_fields__.keys():
        raise ValueError(f"describes {what} with other keys: {_short(data)}")


def _whole(value: Any, where: str, most: int = _MOST_BYTES) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"has {_short(value)} for {where}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
