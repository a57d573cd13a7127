"""A cache of tokens as it is read: mapped, so that only what is used is in memory."""

from __future__ import annotations

import copy
import mmap
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.data.cache_format import DOCUMENT, MANIFEST_NAME, BuildReport, Manifest, file_path

_CHECKED_BYTES = 16 << 20


class TokenCache:
    """Documents of tokens, in the order of their rows. Made by ``tokenize``."""

    def __init__(
        self,
        manifest: Manifest,
        ids: NDArray[np.unsignedinteger[Any]],
        count_bits: NDArray[np.uint8],
        documents: NDArray[Any],
    ) -> None:
        self._manifest = manifest
        self._ids = ids
        self._count_bits = count_bits
        self.ends = documents["end"].astype(np.int64)
        self.starts = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)
        self.content_hashes = documents["content_hash"].astype(np.uint64)
        self.first_counted = documents["first_counted"].astype(np.int64)

    @property
    def row_format(self) -> str:
        return self._manifest.row_format

    @property
    def report(self) -> BuildReport:
        """What became of the rows when the cache was made."""
        return self._manifest.report

    @property
    def documents_per_example(self) -> int:
        """2 where each example is a pair: the chosen one, then the rejected one."""
        return self._manifest.documents_per_example

    @property
    def num_examples(self) -> int:
        return self._manifest.num_documents // self.documents_per_example

    @property
    def num_tokens(self) -> int:
        return self._manifest.num_tokens

    @property
    def pad_token_id(self) -> int:
        return self._manifest.pad_token_id

    def padded_with(self, token_id: int) -> TokenCache:
        """Return the same tokens with another one to fill sequences up."""
        other = copy.copy(self)
        other._manifest = replace(self._manifest, pad_token_id=token_id)
        return other

    @property
    def checksum(self) -> int:
        """32 bits of all that the cache holds, so that other tokens do not pass for these."""
        sums = [file["crc32"] for _, file in sorted(self._manifest.files.items())]
        return zlib.crc32(np.array(sums, dtype="<u8").tobytes())

    def ids(self, start: int, length: int) -> NDArray[np.int64]:
        """Return the ids from number ``start`` of the whole cache on."""
        return self._ids[start : start + length].astype(np.int64)

    def counts(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return which of them count for the loss."""
        first = start // 8
        bits = np.unpackbits(self._count_bits[first : (start + length + 7) // 8], bitorder="little")
        return bits[start - first * 8 :][:length].astype(np.bool_)


def open_cache(directory: Path, made_from: dict[str, Any]) -> TokenCache | None:
    """Return the cache, or None if there is none, it is damaged, or made from something else."""
    try:
        manifest = Manifest.from_json((directory / MANIFEST_NAME).read_bytes())
        if manifest.made_from != made_from:
            return None
        mapped = {
            kind: _mapped(file_path(directory, kind, manifest.name), **manifest.files[kind])
            for kind in ("ids", "counts", "documents")
        }
        ids = mapped["ids"].view(np.dtype(f"<u{manifest.id_bytes}"))
        documents = mapped["documents"].view(DOCUMENT)
        cache = TokenCache(manifest, ids, mapped["counts"], documents)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return cache if _is_consistent(cache, len(ids), len(mapped["counts"])) else None


def _mapped(path: Path, *, num_bytes: int, crc32: int) -> NDArray[np.uint8]:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = np.frombuffer(memory, dtype=np.uint8)
    if len(found) != num_bytes:
        raise ValueError(f"{path} has {len(found)} bytes, not {num_bytes}")
    checksum = 0
    with memoryview(memory) as view:
        for start in range(0, num_bytes, _CHECKED_BYTES):
            checksum = zlib.crc32(view[start : start + _CHECKED_BYTES], checksum)
    if checksum != crc32:
        raise ValueError(f"{path} is damaged")
    return found


def _is_consistent(cache: TokenCache, num_ids: int, num_count_bytes: int) -> bool:
    """Whether files that are as they were written also agree with each other."""
    num_documents = cache.num_examples * cache.documents_per_example
    return (
        num_ids == cache.num_tokens
        and num_count_bytes == (num_ids + 7) // 8
        and len(cache.ends) == num_documents > 0
        and int(cache.ends[-1]) == num_ids
        and bool((cache.ends >= cache.starts).all())
    )
