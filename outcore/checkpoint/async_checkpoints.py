"""Checkpoints that are written while training goes on.

    checkpoints = AsyncCheckpoints(folder, model, optimizer)
    ...
    optimizer.step()
    checkpoints.begin({"data": batches.state_dict()})     # returns at once
    ...
    checkpoints.close()                                   # waits for the last one

``begin`` snapshots the state after that step; a thread writes it. Where the host has no memory for
a snapshot, ``begin`` writes before it returns.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from outcore.checkpoint import run_state
from outcore.checkpoint.contents import (
    RANDOM,
    checkpoint_bytes,
    frozen_fingerprint,
    plain_values,
)
from outcore.checkpoint.entries import FileEntry
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.random_states import random_tensors
from outcore.checkpoint.snapshot import Snapshots, StagedFile
from outcore.checkpoint.tensor_file import write_tensors
from outcore.engine.offload import engine_of
from outcore.errors import OutOfBudget
from outcore.optim.adamw import AdamW

_WRITING_THREADS = 1  # the cores belong to the training


class AsyncCheckpoints:
    """Writes the checkpoints of a run to a folder, one at a time.

    What went wrong with one is raised by the next ``begin``, ``wait`` or ``close``; the checkpoint
    before it is still there, and training may go on.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        model: nn.Module,
        optimizer: AdamW,
        *,
        while_training: bool = True,
        num_saves: int | None = None,
        beside_bytes: int = 0,
    ) -> None:
        """Refuse a folder without room, and take the memory of a snapshot.

        while_training: False where nothing goes on meanwhile, and a snapshot would be of no use.
        num_saves: the most that will be written; None for any number.
        beside_bytes: what else will be written to the same disk.
        """
        run_state.check_ready(
            folder, model, optimizer, num_saves=num_saves, beside_bytes=beside_bytes
        )
        self.folder = folder
        self._model = model
        self._optimizer = optimizer
        self._num_bytes = checkpoint_bytes(model, optimizer)
        self._frozen = frozen_fingerprint(model)
        self._snapshots = _snapshots(model, optimizer) if while_training else None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last: Path | None = None
        self._is_closed = False

    @property
    def is_async(self) -> bool:
        """Whether training goes on while a checkpoint is written."""
        return self._snapshots is not None

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def begin(self, values: dict[str, Any]) -> None:
        """Begin a checkpoint of the state after the last ``step()``; ``values``: plain JSON.

        Call it from the thread that trains, after ``step()`` and before the next ``backward()``.
        While another checkpoint is being written, it waits for that one first.
        """
        if self._is_closed:
            raise ValueError("these checkpoints are closed: make a new AsyncCheckpoints")
        self.wait()
        if self._snapshots is None:
            self._last = run_state.save(self.folder, self._model, self._optimizer, values)
            return
        self._optimizer.take_over_writes()
        plain = plain_values(self._model, self._optimizer, values, frozen=self._frozen)
        generators = random_tensors()
        files = self._snapshots.take()
        files.append(StagedFile(name=RANDOM, tensors=generators, after=()))
        # Not a daemon: a program that ends has its last checkpoint.
        writer = threading.Thread(
            target=self._write,
            args=(self._optimizer.num_steps, files, plain),
            name="outcore-checkpoint-writer",
        )
        writer.start()
        self._writer = writer

    def wait(self) -> Path | None:
        """Wait until the checkpoint that was begun is committed; return where the last one is."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._last

    def close(self) -> None:
        """Wait for the checkpoint that was begun, and give the memory back."""
        self._is_closed = True
        try:
            self.wait()
        finally:
            if self._snapshots is not None:
                self._snapshots.close()
                self._snapshots = None

    def __enter__(self) -> AsyncCheckpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, step: int, files: list[StagedFile], values: dict[str, Any]) -> None:
        def write_files(directory: Path) -> tuple[tuple[FileEntry, ...], dict[str, object]]:
            return tuple(_written(directory, file) for file in files), values

        try:
            self._last = self.folder.commit(step, self._num_bytes, write_files)
        except BaseException as error:  # told to the thread that trains
            self._error = error


def _written(directory: Path, file: StagedFile) -> FileEntry:
    for fence in file.after:
        fence.block()
    return write_tensors(directory / file.name, file.tensors, num_threads=_WRITING_THREADS)


def _snapshots(model: nn.Module, optimizer: AdamW) -> Snapshots | None:
    plan = engine_of(model).plan
    if plan is not None and plan.job.checkpoints and not plan.stages_checkpoints:
        why = "the plan has no host memory for a copy of the state"
    else:
        try:
            return Snapshots(model, optimizer)
        except OutOfBudget as error:
            why = str(error)
    warnings.warn(
        f"checkpoints are written while training waits: {why}",
        RuntimeWarning,
        stacklevel=3,
    )
    return None
