"""The manifest: what a checkpoint holds, and the checksum of every byte of it.

One JSON file beside the tensor files. It ends with a digest of itself, so that a flipped bit in it
is found like any other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcore.errors import StoreError

FORMAT = "outcore checkpoint"
VERSION = 1
NAME = "manifest.json"
_MOST_BYTES = 256 << 20


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


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    files: tuple[FileEntry, ...]
    values: dict[str, Any]  # what is not a tensor: plain JSON

    def to_text(self) -> str:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "files": [asdict(file) for file in self.files],
            "values": self.values,
        }
        return json.dumps({**body, "digest": _digest(body)}, allow_nan=False)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint; StoreError says what is wrong with it."""
    path = directory / NAME
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _wrong(path, f"more than {_MOST_BYTES >> 20} MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
        body = {key: data[key] for key in ("format", "version", "step", "files", "values")}
        digest = data["digest"]
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _wrong(path, f"is no manifest ({type(error).__name__}: {error})") from error
    if body["format"] != FORMAT or body["version"] != VERSION:
        raise _wrong(path, f"is {body['format']!r} version {body['version']!r}, not {VERSION}")
    if digest != _digest(body):
        raise _wrong(path, "does not have the digest that it was written with: it was changed")
    return Manifest(
        step=body["step"],
        files=tuple(_file(file) for file in body["files"]),
        values=body["values"],
    )


def _file(data: dict[str, Any]) -> FileEntry:
    tensors = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in data["tensors"])
    return FileEntry(**{**data, "tensors": tensors})


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _wrong(path: Path, what: str) -> StoreError:
    return StoreError(f"{path}: {what}", path=path)
