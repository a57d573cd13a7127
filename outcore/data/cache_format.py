"""The layout of a cache of tokens: three flat files, and a manifest that says what they hold.

A cache is whole when its manifest is there, since that is written last, and of use when the
manifest says what is wanted now. The files of one building share a random name, so that a new
cache never overwrites what somebody still reads.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 6
MANIFEST_NAME = "manifest.json"
_OWN_NAME = re.compile(
    rf"(ids|counts|documents)-[0-9a-f]{{16}}\.bin|{re.escape(MANIFEST_NAME)}(\.[0-9a-f]{{8}}\.new)?"
)

# Of each document: where it ends in the file of ids, 64 bits of what it says, and its first token
# behind the very first that counts for the loss (its length, where none does).
DOCUMENT = np.dtype([("end", "<u8"), ("content_hash", "<u8"), ("first_counted", "<u8")])


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What became of the rows."""

    num_rows: int
    num_bad_rows: int  # skipped
    num_empty_rows: int  # without text, left out
    first_bad_rows: tuple[tuple[str, int, str], ...]  # path, line, why
    num_rows_without_tools: int = 0  # which they have, and the chat template leaves out


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache holds, and what it was made from."""

    made_from: dict[str, Any]  # format version, sources, tokenizer and options
    name: str  # of this building
    row_format: str
    documents_per_example: int  # 2 for pairs
    num_documents: int
    num_tokens: int
    id_bytes: int  # 2 or 4
    pad_token_id: int
    files: dict[str, dict[str, int]]  # size and checksum by kind
    report: BuildReport

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read what ``to_json`` wrote; ValueError, KeyError or TypeError for anything else."""
        fields = json.loads(data)
        report = fields.pop("report")
        bad = tuple((str(p), int(n), str(why)) for p, n, why in report.pop("first_bad_rows"))
        manifest = Manifest(**fields, report=BuildReport(**report, first_bad_rows=bad))
        numbers = (manifest.num_documents, manifest.num_tokens, manifest.pad_token_id)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a number of the manifest is none")
        if manifest.id_bytes not in (2, 4) or manifest.documents_per_example not in (1, 2):
            raise ValueError("a field of the manifest has no possible value")
        if not re.fullmatch(r"[0-9a-f]{16}", manifest.name):
            raise ValueError("the manifest's name is none")
        return manifest


def file_path(directory: Path, kind: str, name: str) -> Path:
    return directory / f"{kind}-{name}.bin"


def remove_cache(directory: Path) -> None:
    """Delete a cache and what unfinished ones left. Only files of our names; others stay."""
    with contextlib.suppress(FileNotFoundError):
        # The manifest first: without it, the rest is no cache.
        for path in sorted(directory.iterdir(), key=lambda path: path.name != MANIFEST_NAME):
            if _OWN_NAME.fullmatch(path.name):
                path.unlink()
        with contextlib.suppress(OSError):  # not empty
            directory.rmdir()
