"""The checkpoint with the lowest held-out loss so far, in a folder of its own beside the others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from outcore.checkpoint import run_state
from outcore.checkpoint.contents import checkpoint_bytes
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import LaneError, StoreError
from outcore.optim.adamw import AdamW
from outcore.train.changed_settings import changed_settings
from outcore.train.output_directory import BEST
from outcore.train.run_values import read_values


class BestCheckpoint:
    """Written whenever an evaluation finds less than ``loss``; a failure to write it is told."""

    def __init__(
        self, checkpoints: Path, model: nn.Module, optimizer: AdamW, tell: Callable[[str], None]
    ) -> None:
        self.loss: float | None = None
        self._path = checkpoints / BEST
        self._model = model
        self._optimizer = optimizer
        self._tell = tell

    def num_bytes(self, num_evaluations: int) -> int:
        """Return what it takes more on the disk; a new one is whole before the old one goes."""
        each = checkpoint_bytes(self._model, self._optimizer)
        held = sum(path.stat().st_size for path in self._path.rglob("*") if path.is_file())
        return max(0, each * min(2, num_evaluations) - held)

    def resume(self, step: int, held_out: dict[str, float], settings: dict[str, Any]) -> None:
        """Know the loss of the one that is there, of a run that goes on behind ``step``.

        held_out: what losses are of.
        It may be newer than all other checkpoints: a run is killed also between the two. With other
        settings it is of steps that were given up, and that this run will not take again.
        """
        self.loss = None
        with contextlib.suppress(StoreError):  # harmed: the next one takes its place
            for _, manifest in CheckpointFolder(self._path).newest(lambda *_: None):
                said = read_values(manifest.values.get("run", {}), self._path)
                if said.held_out not in ({}, held_out):
                    self._tell(
                        f"the held-out data{_or_beta(held_out)} is not what it was: the best "
                        "checkpoint so far does not count"
                    )
                elif said.step > step and changed_settings(said.settings, settings):
                    self._tell(
                        f"the best checkpoint so far is of step {said.step} with other settings: "
                        "it does not count"
                    )
                else:
                    self.loss = said.best
                return

    def keep_if_better(self, loss: float, values: Callable[[], dict[str, Any]]) -> None:
        """Write one where ``loss`` is the lowest; ``values`` has it as the best by then."""
        if not math.isfinite(loss) or (self.loss is not None and loss >= self.loss):
            return
        before, self.loss = self.loss, loss
        with contextlib.closing(CheckpointFolder(self._path, keep=1)) as folder:
            # A killed run's, which is passed again, otherwise; skipped steps are in no number here.
            folder.give_up_after(self._optimizer.num_steps)
            try:
                run_state.save(folder, self._model, self._optimizer, values())
            except LaneError:  # of the disk that training itself needs
                raise
            except StoreError as error:
                self.loss = before
                self._tell(f"the best checkpoint so far was not written: {error}")


def _or_beta(held_out: dict[str, float]) -> str:
    return ", or --dpo-beta," if "dpo_beta" in held_out else ""
