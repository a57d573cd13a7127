"""The state of a run to and from a checkpoint: weights, optimizer state, generators, values.

A checkpoint knows nothing of homes: a run may go on with another plan, and to the same bits.
``AsyncCheckpoints`` writes the same files while training goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outcore.checkpoint.contents import (
    RANDOM,
    WEIGHT,
    Named,
    checkpoint_bytes,
    frozen_fingerprint,
    home_tensors,
    plain_values,
    trained_units,
)
from outcore.checkpoint.entries import FileEntry
from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import Manifest
from outcore.checkpoint.random_states import check_random, random_tensors, restore_random
from outcore.checkpoint.tensor_file import check_file, dtype_of, read_tensors, write_tensors
from outcore.engine.offload import engine_of
from outcore.errors import StoreError
from outcore.optim.adamw import AdamW

_MOST_RANDOM_BYTES = 1 << 20  # of one generator
_STEP_COUNTS = "step_counts"  # not in checkpoints of earlier versions: all saw every step
_VALUES = {
    "run": dict,
    "optimizer": list,
    "num_skipped_steps": int,
    "state_format": str,
    "frozen": str,
    "random": dict,
}


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on."""

    step: int
    values: dict[str, Any]  # what the run gave to ``save``


def check_ready(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: AdamW,
    *,
    num_saves: int | None = None,
    beside_bytes: int = 0,
) -> None:
    """Refuse, before training starts, a folder that has no room or is another run's."""
    folder.check_ready(
        checkpoint_bytes(model, optimizer),
        step=optimizer.num_steps,
        num_saves=num_saves,
        beside_bytes=beside_bytes,
    )


def save(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: AdamW,
    values: dict[str, Any],
) -> Path:
    """Write a checkpoint of the state after the last ``step()``; ``values`` must be plain JSON."""
    engine_of(model).synchronize()
    optimizer.take_over_writes()
    plain = plain_values(model, optimizer, values, frozen=frozen_fingerprint(model))

    def write_files(directory: Path) -> tuple[tuple[FileEntry, ...], dict[str, object]]:
        files = home_tensors(model, optimizer, checked=True)
        written = [write_tensors(directory / name, tensors) for name, tensors in files]
        written.append(write_tensors(directory / RANDOM, random_tensors()))
        return tuple(written), plain

    return folder.commit(optimizer.num_steps, checkpoint_bytes(model, optimizer), write_files)


def load(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: AdamW,
    *,
    is_checked: bool = False,
    with_random: bool = True,
) -> Resumed | None:
    """Restore the newest checkpoint that is whole; None if there is none.

    Everything is checked before anything is changed; ``is_checked``: by ``check`` just now.
    with_random: the random generators too; ``load_random`` does it later otherwise.
    """
    for directory, manifest in folder.newest(_trust if is_checked else _check):
        places = _places(model, optimizer)
        _check_fits(directory, manifest, places, model, optimizer)
        _restore(directory, manifest, places, model, optimizer)
        if with_random:
            _restore_random(directory, manifest)
        return Resumed(step=manifest.step, values=manifest.values["run"])
    return None


def check(folder: CheckpointFolder) -> int | None:
    """Return the step of the newest checkpoint, every byte of which was read; None if none is."""
    return next((manifest.step for _, manifest in folder.newest(_check)), None)


def load_random(folder: CheckpointFolder) -> None:
    """Restore the random generators alone."""
    for directory, manifest in folder.newest(_trust):
        _restore_random(directory, manifest)


def _places(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return where each tensor is read to: weights to the parameters, the rest to its home."""
    places = {n: t for _, tensors in home_tensors(model, optimizer) for n, t in tensors}
    for unit in trained_units(model):
        for field in unit.layout.trainable:
            name = f"{unit.full_name(field.name)}.{WEIGHT}"
            places[name] = unit.parameters[field.name].detach()
    return places


def _check(directory: Path, manifest: Manifest) -> None:
    """See that a checkpoint is whole, and that it has what a checkpoint has."""
    for key, kind in _VALUES.items():
        if type(manifest.values.get(key)) is not kind:
            raise StoreError(f"{directory} has no {key!r} of a run in it", path=directory)
    for file in manifest.files:
        check_file(directory, file)
    states = _random_states(directory, manifest)
    try:
        check_random(states, manifest.values["random"])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(
            f"{directory} holds states that no random generator has: {error}", path=directory
        ) from error


def _trust(directory: Path, manifest: Manifest) -> None:
    """Take the files as they are: what is read from them is compared with its checksum anyway."""


def _check_fits(
    directory: Path,
    manifest: Manifest,
    places: dict[str, Tensor],
    model: nn.Module,
    optimizer: AdamW,
) -> None:
    saved = {
        entry.name: (dtype_of(entry), entry.shape)
        for file in manifest.files
        if file.name != RANDOM
        for entry in file.tensors
    }
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in places.items()}
    differing = sorted(n for n in saved.keys() | wanted.keys() if saved.get(n) != wanted.get(n))
    if differing:
        name = differing[0]
        raise StoreError(
            f"{directory} is of another model, dtype or state_format: {name} is "
            f"{saved.get(name, 'not there')} in it and {wanted.get(name, 'not there')} here "
            f"({len(differing)} differ)",
            path=directory,
        )
    here = engine_of(model).options.state_format.name
    if manifest.values["state_format"] != here:
        raise StoreError(
            f"{directory} has state_format={manifest.values['state_format']!r}, the model {here!r}",
            path=directory,
        )
    if manifest.values["frozen"] != frozen_fingerprint(model):
        raise StoreError(
            f"{directory} was trained over other frozen weights: load the model that this run "
            "began with",
            path=directory,
        )
    try:
        optimizer.check_hyperparameters(manifest.values["optimizer"])
        if _STEP_COUNTS in manifest.values:
            optimizer.check_step_counts(manifest.values[_STEP_COUNTS], manifest.step)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{directory} is of another optimizer: {error}", path=directory) from error


def _restore(
    directory: Path,
    manifest: Manifest,
    places: dict[str, Tensor],
    model: nn.Module,
    optimizer: AdamW,
) -> None:
    engine = engine_of(model)
    engine.synchronize()
    files = [file for file in manifest.files if file.name != RANDOM]
    with torch.no_grad():
        for weights in (True, False):  # writing weights clears the remainders, so those come after
            for file in files:
                chosen = [e.name for e in file.tensors if e.name.endswith(f".{WEIGHT}") == weights]
                read_tensors(directory, file, ((name, places[name]) for name in chosen))
            if weights:
                engine.weights_replaced()
    optimizer.resume(manifest.step, manifest.values["optimizer"], manifest.values.get(_STEP_COUNTS))
    optimizer.num_skipped_steps = manifest.values["num_skipped_steps"]


def _restore_random(directory: Path, manifest: Manifest) -> None:
    restore_random(dict(_random_states(directory, manifest)), manifest.values["random"])


def _random_states(directory: Path, manifest: Manifest) -> Named:
    file = next((file for file in manifest.files if file.name == RANDOM), None)
    if file is None:
        raise StoreError(f"{directory} has no {RANDOM}", path=directory)
    if any(entry.num_bytes > _MOST_RANDOM_BYTES for entry in file.tensors):
        raise StoreError(f"{directory / RANDOM} is too large for random states", path=directory)
    states = [(e.name, torch.empty(e.shape, dtype=dtype_of(e))) for e in file.tensors]
    read_tensors(directory, file, states)
    return states
