"""The folder of checkpoints: each written beside the others and committed by one rename.

step-000000040          a checkpoint; step-000000040-1 is a later one of the same step
.writing-…, .removing-… unfinished; removed with the next commit
.lock                   held by the process that writes here
"""

from __future__ import annotations

import contextlib
import errno
import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from outcore.checkpoint import calls
from outcore.checkpoint.entries import FileEntry
from outcore.checkpoint.manifest import Manifest, read_manifest, write_manifest
from outcore.checkpoint.transfer import called
from outcore.errors import StoreError
from outcore.units import format_bytes

_COMMITTED = re.compile(r"step-(\d{9,18})(?:-(\d{1,9}))?")
_WRITING, _REMOVING, _LOCK = ".writing-", ".removing-", ".lock"
_MARGIN_BYTES = 64 << 20

WriteFiles = Callable[[Path], tuple[tuple[FileEntry, ...], dict[str, object]]]
"""Writes the tensor files into a directory; returns them and the plain values."""


class CheckpointFolder:
    """All checkpoints of one run. One process writes at a time; another one is refused."""

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, not {keep}")
        self.path = path
        self.keep = keep
        self._lock_fd: int | None = None
        self._given_up: set[str] = set()  # harmed, so that a run went on from an older one

    def steps(self) -> list[int]:
        """Return the steps that are committed, oldest first."""
        return sorted({step for step, _, _ in self._committed()})

    def directory(self, step: int) -> Path:
        """Return where the last checkpoint of a step is, or where its first would be."""
        names = [name for of, _, name in self._committed() if of == step]
        return self.path / (names[-1] if names else f"step-{step:09d}")

    def prepare(self) -> None:
        """Make the folder, and keep other processes from writing to it."""
        if self._lock_fd is not None:
            return
        if not self.path.is_dir():
            called("create", self.path, lambda: calls.make_directories(self.path))
        path = self.path / _LOCK
        try:
            self._lock_fd = calls.lock(path)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return  # a file system without locks
            if isinstance(error, BlockingIOError):
                raise StoreError(
                    f"{self.path}: another process writes here. End it, or name another folder.",
                    path=self.path,
                ) from error
            raise StoreError(f"{path} cannot be locked: {error}", path=path) from error

    def check_ready(
        self, num_bytes: int, *, step: int, num_saves: int | None = None, beside_bytes: int = 0
    ) -> None:
        """Refuse, before training starts, what could not be written later.

        ``num_bytes``: of one checkpoint; ``step``: where the run begins; ``num_saves``: the most
        that it will write, None for any number; ``beside_bytes``: what else will come to this disk.
        """
        self.prepare()
        newer = [s for s, _, name in self._committed() if s > step and name not in self._given_up]
        if newer:
            raise StoreError(
                f"{self.path} holds a checkpoint of step {max(newer)}, and this run begins at step "
                f"{step}: resume from it, or name another folder",
                path=self.path,
            )
        self._prune(step)  # a run that was killed may have left more than it keeps
        held = sum(self._size_of(name) for _, _, name in self._committed())
        needed = (self.keep + 1) * num_bytes - min(held, self.keep * num_bytes)
        if num_saves is not None:
            needed = min(needed, num_saves * num_bytes)
        needed += beside_bytes
        beside = f" with {format_bytes(beside_bytes)} of other files" if beside_bytes else ""
        free = called("examine", self.path, lambda: calls.free_bytes(self.path))
        if needed + _MARGIN_BYTES > free:
            raise StoreError(
                f"{self.path}: a checkpoint takes {format_bytes(num_bytes)}, and up to {self.keep} "
                f"are kept while one is written, so {format_bytes(needed)} more are "
                f"needed{beside}, and {format_bytes(_MARGIN_BYTES)} to spare; "
                f"{format_bytes(free)} are free there. Free space, keep fewer checkpoints, or name "
                "another folder.",
                path=self.path,
            )

    def commit(self, step: int, num_bytes: int, write_files: WriteFiles) -> Path:
        """Write a checkpoint; the one before stays as it is until this one is whole."""
        self.prepare()
        self._check_room(num_bytes)
        writing = self.path / f"{_WRITING}{step}-{uuid.uuid4().hex[:8]}"
        try:
            called("create", writing, lambda: calls.make_directory(writing))
            files, values = write_files(writing)
            write_manifest(writing, Manifest(step=step, files=files, values=dict(values)))
            called("sync", writing, lambda: calls.sync_directory(writing))
            final = self._unused_name(step)
            called("rename", writing, lambda: calls.rename(writing, final))
            called("sync", self.path, lambda: calls.sync_directory(self.path))
        except BaseException:
            with contextlib.suppress(OSError):
                calls.remove_tree(writing)
            raise
        with contextlib.suppress(StoreError):  # it is committed, whatever happens to the others
            self._prune(step, given_up=self._given_up)
            self._given_up.clear()
        return final

    def newest(self, check: Callable[[Path, Manifest], None]) -> Iterator[tuple[Path, Manifest]]:
        """Yield the newest checkpoint that ``check`` lets pass; StoreError if none does.

        A harmed one that is passed over is named in a warning, and removed with the next commit.
        """
        problems = []
        for step, _, name in reversed(self._committed()):
            directory = self.path / name
            try:
                manifest = read_manifest(directory)
                if manifest.step != step:
                    raise StoreError(f"{directory} is of step {manifest.step}", path=directory)
                check(directory, manifest)
            except StoreError as error:
                problems.append((name, str(error)))
                continue
            self._given_up.discard(name)
            for bad, why in problems:
                self._given_up.add(bad)
                warnings.warn(f"{why}. {name} is used in place of {bad}.", stacklevel=2)
            yield directory, manifest
            return
        if problems:
            whys = "; ".join(why for _, why in problems)
            raise StoreError(
                f"no checkpoint can be used: {whys}; put whole ones back, or begin anew in another "
                "folder",
                path=self.path,
            )

    def give_up_after(self, step: int) -> None:
        """Let the next commit remove what is of later steps, which would pass for newer."""
        self._given_up |= {name for of, _, name in self._committed() if of > step}

    def close(self) -> None:
        """Let another process write here."""
        if self._lock_fd is not None:
            calls.close(self._lock_fd)
            self._lock_fd = None

    def close_and_remove_if_empty(self) -> None:
        """Leave nothing of a folder that was only there to keep other processes away."""
        with contextlib.suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [_LOCK]:
                (self.path / _LOCK).unlink()
                self.path.rmdir()
        self.close()

    def _committed(self) -> list[tuple[int, int, str]]:
        """Return (step, number of it, name) of each checkpoint, oldest first."""
        matches = (_COMMITTED.fullmatch(name) for name in self._names())
        return sorted((int(m[1]), int(m[2] or 0), m[0]) for m in matches if m)

    def _names(self) -> list[str]:
        if not self.path.is_dir():
            return []
        return called("list", self.path, lambda: calls.list_names(self.path))

    def _size_of(self, name: str) -> int:
        path = self.path / name
        return called("examine", path, lambda: calls.size_of_tree(path))

    def _unused_name(self, step: int) -> Path:
        numbers = [number for of, number, _ in self._committed() if of == step]
        name = f"step-{step:09d}"
        return self.path / (f"{name}-{max(numbers) + 1}" if numbers else name)

    def _prune(self, step: int, given_up: Iterable[str] = ()) -> None:
        """Remove what is older than the last ``keep``, was given up, or is unfinished.

        Checkpoints of later steps are somebody else's, and count for nothing here.
        """
        earlier = [name for of, _, name in self._committed() if of <= step]
        good = [name for name in earlier if name not in self._given_up]
        last: dict[str, str] = {}
        for name in good:
            last[name.split("-")[1]] = name  # of one step only the last counts
        kept = list(last.values())[-self.keep :]
        old = [name for name in good if name not in kept]
        for name in [*old, *given_up]:
            removing = self.path / f"{_REMOVING}{name}-{uuid.uuid4().hex[:8]}"
            with contextlib.suppress(OSError):  # takes room, and harms nothing
                calls.rename(self.path / name, removing)  # never half a checkpoint under its name
        for name in self._names():
            if name.startswith((_WRITING, _REMOVING)):
                with contextlib.suppress(OSError):
                    calls.remove_tree(self.path / name)

    def _check_room(self, num_bytes: int) -> None:
        """Refuse what cannot fit; nothing more is spared: the state may be nowhere else by now."""
        free = called("examine", self.path, lambda: calls.free_bytes(self.path))
        if num_bytes > free:
            raise StoreError(
                f"{self.path}: a checkpoint takes {format_bytes(num_bytes)}, "
                f"{format_bytes(free)} are free there. Free space, or keep fewer checkpoints.",
                path=self.path,
            )
