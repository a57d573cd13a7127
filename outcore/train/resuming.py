"""Going on from a run's newest checkpoint, or saying why that cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import StoreError
from outcore.optim.adamw import AdamW
from outcore.train.changed_settings import changed_settings
from outcore.train.corpus import Corpus
from outcore.train.run_values import read_values
from outcore.train.settings import TrainSettings, to_dict


def resume(
    settings: TrainSettings,
    folder: CheckpointFolder,
    model: Any,
    optimizer: AdamW,
    corpus: Corpus,
    tell: Callable[[str], None],
) -> int | None:
    """Put model, optimizer and data where the newest checkpoint has them; return its step.

    None where there is no checkpoint. What the settings say now, such as lr, counts.
    """
    asked = optimizer.hyperparameters()
    try:
        resumed = run_state.load(folder, model, optimizer)
    except StoreError as error:
        if changed := _changed_since_newest(settings, folder):
            raise StoreError(f"{error}.{_others(changed)}", path=error.path) from error
        raise
    for group, values in zip(optimizer.param_groups, asked, strict=True):
        group.update(values)
    if resumed is None:
        tell("no checkpoint to resume from: starting at the beginning")
        return None
    said = read_values(resumed.values, folder.path)
    changed = changed_settings(said.settings, to_dict(settings))
    try:
        corpus.training.load_state_dict(said.batches)
    except ValueError as error:
        raise StoreError(
            f"{folder.path} is of a run on other data, or on other batches of it: "
            f"{error}.{_others(changed)}",
            path=folder.path,
        ) from error
    if said.step > corpus.num_steps:
        raise ValueError(
            f"{settings.output} has a checkpoint of step {said.step}, and only "
            f"{corpus.num_steps} steps are asked for: --max-steps {said.step} writes the "
            "model as it is, more go on"
        )
    if changed:
        tell("other settings than before: " + ", ".join(changed))
    tell(f"resumed after step {said.step}")
    return said.step


def _changed_since_newest(settings: TrainSettings, folder: CheckpointFolder) -> list[str]:
    with contextlib.suppress(StoreError):
        for _, manifest in folder.newest(lambda *_: None):
            said = read_values(manifest.values.get("run", {}), folder.path)
            return changed_settings(said.settings, to_dict(settings))
    return []


def _others(changed: list[str]) -> str:
    return f" Other settings than before: {', '.join(changed)}." if changed else ""
