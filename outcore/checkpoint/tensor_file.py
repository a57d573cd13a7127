"""A file of tensors: ordinary safetensors, each tensor on pages of its own, with a checksum.

Every byte of the file is under a checksum, padding included. Written once and synced; several
threads write and check pieces at a time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outcore.checkpoint import calls
from outcore.checkpoint.manifest import Entry, FileEntry
from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES, Bytes, checksum_pages
from outcore.store.pieces import OpenFile, failed, read_piece, write_piece

_PIECE_BYTES = 8 << 20
_NUM_THREADS = 4
_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tensors of a file will be, before anything is written."""

    header: bytes
    entries: tuple[Entry, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Tensor]]) -> Layout:
        """Lay ``tensors`` out in order; gaps are tensors too, since safetensors has no holes."""
        fields: dict[str, Any] = {}
        entries, position = [], 0
        for name, tensor in tensors:
            size = tensor.numel() * tensor.itemsize
            shape = tuple(tensor.shape)
            fields[name] = _field(_TYPES[tensor.dtype], shape, position, size)
            pages = -(-size // PAGE_BYTES)
            entries.append(
                Entry(
                    name=name,
                    dtype=_TYPES[tensor.dtype],
                    shape=shape,
                    offset=position,
                    num_bytes=size,
                    num_pages=pages,
                    checksum=0,
                )
            )
            gap = pages * PAGE_BYTES - size
            if gap:
                fields[f"padding.{len(entries)}"] = _field("U8", (gap,), position + size, gap)
            position += pages * PAGE_BYTES
        text = json.dumps(fields).encode()
        length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
        header = length.to_bytes(8, "little") + text.ljust(length)
        placed = tuple(replace(e, offset=e.offset + len(header)) for e in entries)
        return cls(header=header, entries=placed, num_bytes=len(header) + position)


def _field(dtype: str, shape: tuple[int, ...], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> FileEntry:
    """Write a new file, whole and synced; leaves nothing behind if it fails."""
    layout = Layout.of(tensors)
    try:
        fd = calls.create(path)
    except OSError as error:
        raise failed(error, path=path, verb="create", offset=0, num_bytes=0) from error
    try:
        file = OpenFile(path=path, fd=fd, is_direct=False)
        _call(file, layout.num_bytes, "allocate", calls.allocate, fd, layout.num_bytes)
        header = _padded(np.frombuffer(layout.header, np.uint8))
        write_piece(file, header, 0)
        entries = [
            replace(entry, checksum=_write(file, entry, tensor))
            for entry, (_, tensor) in zip(layout.entries, tensors, strict=True)
        ]
        _call(file, layout.num_bytes, "sync", calls.sync, fd)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        calls.close(fd)
    return FileEntry(
        name=path.name,
        num_bytes=layout.num_bytes,
        header=checksum_pages(header),
        tensors=tuple(entries),
    )


def check_file(directory: Path, file: FileEntry) -> None:
    """Read a whole file and compare every checksum."""
    read_tensors(directory, file, ((entry.name, None) for entry in file.tensors))


def read_tensors(
    directory: Path, file: FileEntry, wanted: Iterable[tuple[str, Tensor | None]]
) -> None:
    """Read tensors into those given, None to check only; StoreError if a byte is not as written."""
    path = directory / file.name
    entries = {entry.name: entry for entry in file.tensors}
    try:
        fd = _open(path)
    except OSError as error:
        raise failed(error, path=path, verb="open", offset=0, num_bytes=0) from error
    try:
        opened = OpenFile(path=path, fd=fd, is_direct=False)
        first = min((entry.offset for entry in file.tensors), default=file.num_bytes)
        header = np.empty(first, np.uint8)
        read_piece(opened, header, 0)
        if checksum_pages(header) != file.header:
            raise _corrupt(path, 0, "its header")
        for name, target in wanted:
            _read(opened, entries[name], target)
    finally:
        calls.close(fd)


def dtype_of(entry: Entry) -> torch.dtype:
    return _DTYPES[entry.dtype]


def _open(path: Path) -> int:
    import os

    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))


def _write(file: OpenFile, entry: Entry, tensor: Tensor) -> int:
    def piece(start: int) -> int:
        data = _bytes_of(tensor, start, min(start + _PIECE_BYTES, entry.num_bytes))
        pages = _padded(data)
        write_piece(file, pages, entry.offset + start)
        return checksum_pages(pages, first_page=start // PAGE_BYTES)

    return _sum_of(piece, entry)


def _read(file: OpenFile, entry: Entry, target: Tensor | None) -> None:
    def piece(start: int) -> int:
        size = min(_PIECE_BYTES, entry.num_pages * PAGE_BYTES - start)
        pages = np.empty(size, np.uint8)
        read_piece(file, pages, entry.offset + start)
        if target is not None:
            _put(target, start, pages[: entry.num_bytes - start])
        return checksum_pages(pages, first_page=start // PAGE_BYTES)

    if _sum_of(piece, entry) != entry.checksum:
        raise _corrupt(file.path, entry.offset, f"tensor {entry.name}")


def _sum_of(piece: Callable[[int], int], entry: Entry) -> int:
    starts = range(0, entry.num_bytes, _PIECE_BYTES)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return sum(pool.map(piece, starts)) % 2**64


def _bytes_of(tensor: Tensor, start: int, end: int) -> Bytes:
    """Return bytes [start, end) of a tensor, from wherever it is."""
    size = tensor.itemsize
    part = tensor.detach().reshape(-1)[start // size : -(-end // size)].cpu()
    return part.view(torch.uint8).numpy()


def _put(target: Tensor, start: int, data: Bytes) -> None:
    flat, size = target.detach().reshape(-1), target.itemsize
    values = torch.from_numpy(data).view(target.dtype)
    flat[start // size : start // size + values.numel()].copy_(values)


def _padded(data: Bytes) -> Bytes:
    gap = -data.size % PAGE_BYTES
    return np.concatenate([data, np.zeros(gap, np.uint8)]) if gap else data


def _call(file: OpenFile, num_bytes: int, verb: str, call: Any, *args: Any) -> None:
    try:
        call(*args)
    except OSError as error:
        raise failed(error, path=file.path, verb=verb, offset=0, num_bytes=num_bytes) from error


def _corrupt(path: Path, offset: int, what: str) -> StoreError:
    return StoreError(
        f"{path}: {what} at offset {offset} does not have the checksum that it was written with",
        path=path,
        offset=offset,
    )
