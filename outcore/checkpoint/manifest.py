"""The manifest: what a checkpoint holds, and the checksum of every byte of it.

One JSON file beside the tensor files. It ends with a digest of itself, so that a flipped bit in it
is found like any other. Whoever can write a checkpoint can write its digest too, so nothing that a
manifest says is believed before ``manifest_checks`` has seen it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outcore.checkpoint import calls
from outcore.checkpoint.entries import FileEntry
from outcore.checkpoint.manifest_checks import checked_files
from outcore.checkpoint.transfer import called, opened, read_all, write_all, written_file
from outcore.errors import StoreError
from outcore.limited_json import parse_limited

FORMAT = "outcore checkpoint"
VERSION = 1
NAME = "manifest.json"
_MOST_BYTES = 256 << 20
_MOST_MEMORY_BYTES = 1 << 30  # of some 400,000 tensors
_BODY = ("format", "version", "step", "files", "values")


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


def write_manifest(directory: Path, manifest: Manifest) -> None:
    path = directory / NAME
    data = np.frombuffer(manifest.to_text().encode(), np.uint8)

    def write(fd: int) -> None:
        called("allocate", path, lambda: calls.allocate(fd, data.size), data.size)
        write_all(path, fd, data, 0)

    written_file(path, write)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint; StoreError says what is wrong with it."""
    path = directory / NAME
    with opened(path) as (fd, num_bytes):
        if num_bytes > _MOST_BYTES:
            raise _wrong(path, f"has {num_bytes} bytes, more than {_MOST_BYTES >> 20} MiB")
        raw = np.empty(num_bytes, np.uint8)
        read_all(path, fd, raw, 0)
    try:
        text = raw.tobytes().decode()
        data = parse_limited(raw.tobytes(), most_bytes=_MOST_MEMORY_BYTES)
        body = {key: data[key] for key in _BODY}
        digest = data["digest"]
        # A changed byte may read as the same value (1e-8 and 1E-8): it is a changed byte.
        is_as_written = json.dumps({**body, "digest": digest}) == text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _wrong(path, f"is no manifest ({type(error).__name__}: {error})") from error
    if body["format"] != FORMAT or body["version"] != VERSION:
        raise _wrong(path, f"is {body['format']!r} version {body['version']!r}, not {VERSION}")
    if not is_as_written or digest != _digest(body):
        raise _wrong(path, "does not have the digest that it was written with: it was changed")
    step, values = body["step"], body["values"]
    if type(step) is not int or step < 0:
        raise _wrong(path, f"has the step {step!r}")
    if not isinstance(values, dict):
        raise _wrong(path, "has values that are no object")
    try:
        files = checked_files(body["files"])
    except ValueError as error:
        raise _wrong(path, str(error)) from error
    return Manifest(step=step, files=files, values=values)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _wrong(path: Path, what: str) -> StoreError:
    return StoreError(f"{path} {what}", path=path)
