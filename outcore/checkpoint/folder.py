"""The folder of checkpoints: each written beside the others and committed by one rename."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from outcore.checkpoint import calls
from outcore.checkpoint.manifest import NAME, FileEntry, Manifest, read_manifest
from outcore.errors import StoreError
from outcore.store.pieces import failed
from outcore.units import format_bytes

_COMMITTED = re.compile(r"step-(\d{9,})")
_UNFINISHED = (".writing-", ".replaced-")
_MARGIN_BYTES = 64 << 20

WriteFiles = Callable[[Path], tuple[tuple[FileEntry, ...], dict[str, object]]]
"""Writes the tensor files into a directory; returns them and the plain values."""


class CheckpointFolder:
    """All checkpoints of one run. One process writes at a time."""

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, not {keep}")
        self.path = path
        self.keep = keep

    def steps(self) -> list[int]:
        """Return the steps that are committed, oldest first."""
        if not self.path.is_dir():
            return []
        matches = (_COMMITTED.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def directory(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    def commit(self, step: int, num_bytes: int, write_files: WriteFiles) -> Path:
        """Write a checkpoint; the one before stays as it is until this one is whole."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_room(num_bytes)
        mark = uuid.uuid4().hex[:8]
        writing = self.path / f"{_UNFINISHED[0]}{step}-{mark}"
        replaced = self.path / f"{_UNFINISHED[1]}{step}-{mark}"
        final = self.directory(step)
        try:
            self._call("create", writing, calls.make_directory, writing)
            files, values = write_files(writing)
            manifest = Manifest(step=step, files=files, values=dict(values))
            self._write_manifest(writing / NAME, manifest.to_text())
            self._call("sync", writing, calls.sync_directory, writing)
            if final.exists():
                self._call("rename", final, calls.rename, final, replaced)
            self._call("rename", writing, calls.rename, writing, final)
            self._call("sync", self.path, calls.sync_directory, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                calls.remove_tree(writing)
            if replaced.exists() and not final.exists():
                with contextlib.suppress(OSError):
                    calls.rename(replaced, final)
            raise
        self.prune()
        return final

    def prune(self) -> None:
        """Remove what is older than the last ``keep``, and what a crash has left unfinished."""
        old = [self.directory(step) for step in self.steps()[: -self.keep]]
        for path in [*old, *self._unfinished()]:
            with contextlib.suppress(OSError):  # takes room, and harms nothing
                calls.remove_tree(path)

    def newest(self, check: Callable[[Path, Manifest], None]) -> Iterator[tuple[Path, Manifest]]:
        """Yield the newest checkpoint that ``check`` lets pass; StoreError if none does."""
        problems = []
        for step in reversed(self.steps()):
            directory = self.directory(step)
            try:
                manifest = read_manifest(directory)
                check(directory, manifest)
            except StoreError as error:
                problems.append(str(error))
                continue
            yield directory, manifest
            return
        if problems:
            raise StoreError("no checkpoint can be used: " + "; ".join(problems), path=self.path)

    def _unfinished(self) -> list[Path]:
        return [entry for entry in self.path.iterdir() if entry.name.startswith(_UNFINISHED)]

    def _check_room(self, num_bytes: int) -> None:
        usage = os.statvfs(self.path)
        free = usage.f_bavail * usage.f_frsize
        if num_bytes + _MARGIN_BYTES > free:
            raise StoreError(
                f"{self.path}: a checkpoint takes {format_bytes(num_bytes)}, "
                f"{format_bytes(free)} are free there. Free space, or keep fewer checkpoints.",
                path=self.path,
            )

    def _write_manifest(self, path: Path, text: str) -> None:
        fd = -1
        try:
            fd = calls.create(path)
            data = text.encode()
            while data:
                data = data[calls.write(fd, data) :]
            calls.sync(fd)
        except OSError as error:
            raise failed(error, path=path, verb="write", offset=0, num_bytes=len(text)) from error
        finally:
            if fd >= 0:
                calls.close(fd)

    def _call(self, verb: str, path: Path, call: Callable[..., None], *args: Path) -> None:
        try:
            call(*args)
        except OSError as error:
            raise failed(error, path=path, verb=verb, offset=0, num_bytes=0) from error
