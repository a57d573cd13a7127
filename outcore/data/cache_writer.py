"""Writes documents of tokens to the files of a cache; nothing is left of one that fails."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.data.cache_format import (
    DOCUMENT,
    MANIFEST_NAME,
    BuildReport,
    Manifest,
    file_path,
    remove_cache,
)
from outcore.data.durable_files import GrowingFile, replace_file, sync_directory
from outcore.data.encode import Document
from outcore.errors import StoreError


class CacheWriter:
    """The files of one building; ``finish`` makes a cache of them, ``abandon`` deletes them."""

    def __init__(self, directory: Path, *, max_token_id: int) -> None:
        self._directory = directory
        self._id_type = np.dtype("<u2" if max_token_id < 1 << 16 else "<u4")
        self._max_token_id = max_token_id
        self._name = secrets.token_hex(8)
        self.num_documents = 0
        self._num_tokens = 0
        self._spare_counts: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)  # not yet eight of them
        # Of the document that has begun and not ended; never its tokens, which may be many.
        self._length = 0
        self._first_counted: int | None = None
        self._part_hashes = b""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{directory} cannot be made: {error.strerror}", path=directory
            ) from error
        self._files: dict[str, GrowingFile] = {}
        try:
            for kind in ("ids", "counts", "documents"):
                self._files[kind] = GrowingFile(file_path(directory, kind, self._name))
        except BaseException:
            self.abandon()
            raise

    def add(self, document: Document) -> None:
        """Append a document, or the next part of one."""
        if len(document.ids) and int(document.ids.max()) > self._max_token_id:
            raise ValueError(
                f"the tokenizer gave the id {document.ids.max()}, and its vocabulary ends at "
                f"{self._max_token_id}"
            )
        self._files["ids"].append(document.ids.astype(self._id_type).tobytes())
        self._add_counts(document.counts)
        self._num_tokens += len(document.ids)
        if self._first_counted is None:
            # The first token is predicted from nothing, so its loss never counts.
            skipped = 1 if self._length == 0 else 0
            found = np.flatnonzero(document.counts[skipped:])
            if len(found):
                self._first_counted = self._length + skipped + int(found[0])
        self._length += len(document.ids)
        self._part_hashes += document.content_hash.to_bytes(8, "little")
        if document.ends:
            self._end_document()

    def finish(
        self, *, made_from: dict[str, Any], row_format: str, pad_token_id: int, report: BuildReport
    ) -> None:
        """Sync the files, and then say with a manifest that they are there."""
        assert not self._part_hashes, "the last document has no end"
        if len(self._spare_counts):
            bits = np.packbits(self._spare_counts, bitorder="little")
            self._files["counts"].append(bits.tobytes())
        for file in self._files.values():
            file.finish()
        sync_directory(self._directory)
        manifest = Manifest(
            made_from=made_from,
            name=self._name,
            row_format=row_format,
            documents_per_example=2 if row_format == "preference" else 1,
            num_documents=self.num_documents,
            num_tokens=self._num_tokens,
            id_bytes=self._id_type.itemsize,
            pad_token_id=pad_token_id,
            files={
                kind: {"num_bytes": file.num_bytes, "crc32": file.crc32}
                for kind, file in self._files.items()
            },
            report=report,
        )
        replace_file(self._directory / MANIFEST_NAME, manifest.to_json())

    def abandon(self) -> None:
        for file in self._files.values():
            file.abandon()
        remove_cache(self._directory)

    def _add_counts(self, counts: NDArray[np.bool_]) -> None:
        counts = np.concatenate([self._spare_counts, counts])
        whole = len(counts) // 8 * 8
        self._files["counts"].append(np.packbits(counts[:whole], bitorder="little").tobytes())
        self._spare_counts = counts[whole:]

    def _end_document(self) -> None:
        hashes = self._part_hashes
        if len(hashes) > 8:
            hashes = hashlib.blake2b(hashes, digest_size=8).digest()
        record = np.zeros(1, dtype=DOCUMENT)
        record["end"] = self._num_tokens
        record["content_hash"] = int.from_bytes(hashes, "little")
        record["first_counted"] = (
            self._length if self._first_counted is None else self._first_counted
        )
        self._files["documents"].append(record.tobytes())
        self.num_documents += 1
        self._length, self._first_counted, self._part_hashes = 0, None, b""
