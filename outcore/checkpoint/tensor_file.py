"""A file of tensors: ordinary safetensors, each tensor on pages of its own, with a checksum.

Every byte of the file is under a checksum, padding included. Written once and synced.
"""

from __future__ import annotations

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
from outcore.checkpoint.entries import Entry, FileEntry
from outcore.checkpoint.tensor_types import DTYPES, TYPES
from outcore.checkpoint.transfer import called, opened, read_all, write_all, written_file
from outcore.errors import StoreError
from outcore.kernels.checksum import PAGE_BYTES, Bytes, checksum_pages

_PIECE_BYTES = 8 << 20
NUM_THREADS = 4  # that read or write pieces of one tensor, while nothing else is done


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
            if tensor.dtype not in TYPES:
                raise ValueError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
            size = tensor.numel() * tensor.itemsize
            shape = tuple(tensor.shape)
            fields[name] = _field(TYPES[tensor.dtype], shape, position, size)
            pages = -(-size // PAGE_BYTES)
            entries.append(
                Entry(
                    name=name,
                    dtype=TYPES[tensor.dtype],
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


def write_tensors(
    path: Path, tensors: Sequence[tuple[str, Tensor]], *, num_threads: int = NUM_THREADS
) -> FileEntry:
    """Write a new file, whole and synced; leaves nothing behind if it fails."""
    layout = Layout.of(tensors)
    header = np.frombuffer(layout.header, np.uint8)

    def write(fd: int) -> list[Entry]:
        num_bytes = layout.num_bytes
        called("allocate", path, lambda: calls.allocate(fd, num_bytes), num_bytes)
        write_all(path, fd, header, 0)
        return [
            replace(entry, checksum=_write(path, fd, entry, tensor, num_threads))
            for entry, (_, tensor) in zip(layout.entries, tensors, strict=True)
        ]

    entries = written_file(path, write)
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
    with opened(path) as (fd, num_bytes):
        if num_bytes != file.num_bytes:  # before memory is taken for any of it
            raise StoreError(
                f"{path} has {num_bytes} bytes and was written with {file.num_bytes}", path=path
            )
        header = np.empty(file.tensors[0].offset if file.tensors else num_bytes, np.uint8)
        read_all(path, fd, header, 0)
        if checksum_pages(header) != file.header:
            raise _corrupt(path, 0, "its header")
        for name, target in wanted:
            _read(path, fd, entries[name], target)


def dtype_of(entry: Entry) -> torch.dtype:
    return DTYPES[entry.dtype]


def _write(path: Path, fd: int, entry: Entry, tensor: Tensor, num_threads: int) -> int:
    def piece(start: int) -> int:
        data = _bytes_of(tensor, start, min(start + _PIECE_BYTES, entry.num_bytes))
        pages = _padded(data)
        write_all(path, fd, pages, entry.offset + start)
        return checksum_pages(pages, first_page=start // PAGE_BYTES)

    return _sum_of(piece, entry, num_threads)


def _read(path: Path, fd: int, entry: Entry, target: Tensor | None) -> None:
    if target is not None and not target.is_contiguous():  # a buffer that is a view of another
        whole = torch.empty(target.shape, dtype=target.dtype)
        _read(path, fd, entry, whole)
        target.copy_(whole)
        return

    def piece(start: int) -> int:
        size = min(_PIECE_BYTES, entry.num_pages * PAGE_BYTES - start)
        pages = np.empty(size, np.uint8)
        read_all(path, fd, pages, entry.offset + start)
        if target is not None:
            _put(target, start, pages[: entry.num_bytes - start])
        return checksum_pages(pages, first_page=start // PAGE_BYTES)

    if _sum_of(piece, entry, NUM_THREADS) != entry.checksum:
        raise _corrupt(path, entry.offset, f"tensor {entry.name}")


def _sum_of(piece: Callable[[int], int], entry: Entry, num_threads: int) -> int:
    starts = range(0, entry.num_bytes, _PIECE_BYTES)
    if num_threads == 1 or len(starts) < 2:
        return sum(map(piece, starts)) % 2**64
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(piece, starts)) % 2**64


def _bytes_of(tensor: Tensor, start: int, end: int) -> Bytes:
    """Return bytes [start, end) of a tensor, from wherever it is."""
    size = tensor.itemsize
    part = tensor.detach().reshape(-1)[start // size : -(-end // size)].cpu()
    return part.view(torch.uint8).numpy()


def _put(target: Tensor, start: int, data: Bytes) -> None:
    flat, size = target.detach().view(-1), target.itemsize
    values = torch.from_numpy(data).view(target.dtype)
    flat[start // size : start // size + values.numel()].copy_(values)


def _padded(data: Bytes) -> Bytes:
    gap = -data.size % PAGE_BYTES
    return np.concatenate([data, np.zeros(gap, np.uint8)]) if gap else data


def _corrupt(path: Path, offset: int, what: str) -> StoreError:
    return StoreError(
        f"{path}: {what} at offset {offset} does not have the checksum that it was written with",
        path=path,
        offset=offset,
    )
