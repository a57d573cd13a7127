"""The state of a run in a checkpoint: weights, optimizer state, random generators, and the rest.

Tensors are stored parameter by parameter, so that a checkpoint knows nothing of homes: a run may go
on with another plan, and to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outcore.checkpoint.folder import CheckpointFolder
from outcore.checkpoint.manifest import FileEntry, Manifest
from outcore.checkpoint.random_states import random_tensors, random_values, restore_random
from outcore.checkpoint.tensor_file import (
    Layout,
    check_file,
    dtype_of,
    read_tensors,
    write_tensors,
)
from outcore.engine.offload import engine_of
from outcore.errors import StoreError
from outcore.optim.adamw import AdamW

_EXTRA_BYTES = 1 << 20  # manifest and random states
_WEIGHT = "weight"
_BUFFERS = "buffers.safetensors"
_RANDOM = "random.safetensors"

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on."""

    step: int
    values: dict[str, Any]  # what the run gave to ``save``


def save(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: AdamW,
    values: dict[str, Any],
    *,
    with_frozen: bool = True,
) -> Path:
    """Write a checkpoint of the state after the last ``step()``; ``values`` must be plain JSON.

    ``with_frozen=False`` leaves out weights that are not trained: a run that goes on brings them.
    """
    optimizer.synchronize()
    files = dict(_files(model, optimizer, with_frozen=with_frozen))
    num_bytes = _EXTRA_BYTES + sum(Layout.of(tensors).num_bytes for tensors in files.values())

    def write_files(directory: Path) -> tuple[tuple[FileEntry, ...], dict[str, object]]:
        written = [write_tensors(directory / name, tensors) for name, tensors in files.items()]
        written.append(write_tensors(directory / _RANDOM, random_tensors()))
        return tuple(written), {
            "run": values,
            "optimizer": optimizer.hyperparameters(),
            "state_format": engine_of(model).options.state_format.name,
            "random": random_values(),
        }

    return folder.commit(optimizer.num_steps, num_bytes, write_files)


def load(
    folder: CheckpointFolder,
    model: nn.Module,
    optimizer: AdamW,
    *,
    with_frozen: bool = True,
    is_checked: bool = False,
) -> Resumed | None:
    """Restore the newest checkpoint that is whole; None if there is none.

    Everything is checked before anything is changed; ``is_checked``: by ``check`` just now.
    """
    for directory, manifest in folder.newest(_trust if is_checked else _check):
        targets = dict(_files(model, optimizer, with_frozen=with_frozen))
        _check_fits(directory, manifest, targets, model)
        _restore(directory, manifest, targets, model, optimizer)
        return Resumed(step=manifest.step, values=manifest.values["run"])
    return None


def check(folder: CheckpointFolder) -> int | None:
    """Return the step of the newest checkpoint, every byte of which was read; None if none is."""
    return next((manifest.step for _, manifest in folder.newest(_check)), None)


def load_random(folder: CheckpointFolder) -> None:
    """Restore the random generators alone."""
    for directory, manifest in folder.newest(_trust):
        _restore_random(directory, manifest)


def _files(model: nn.Module, optimizer: AdamW, *, with_frozen: bool) -> Iterator[tuple[str, Named]]:
    """Yield the tensors of each unit, and the model's buffers; all are views of their homes."""
    for unit in engine_of(model).units:
        tensors: Named = []
        trainable = {field.name for field in unit.layout.trainable}
        if unit.packed is not None and with_frozen:
            # As it is: packing what was expanded may round once more.
            tensors.append((f"{unit.name}.packed.{_WEIGHT}", unit.packed_span(unit.home)))
        for name, parameter in unit.parameters.items():
            if parameter.is_meta or (name not in trainable and not with_frozen):
                continue  # in the packed span, or left out
            full = unit.full_name(name)
            tensors.append((f"{full}.{_WEIGHT}", parameter.detach()))
            entry = optimizer.state.get(parameter, {})
            tensors += [(f"{full}.{key}", t) for key, t in entry.items() if key != "step"]
        if tensors:
            yield f"unit-{unit.index:05d}.safetensors", tensors
    persistent = model.state_dict(keep_vars=True)
    buffers = [(n, b) for n, b in model.named_buffers() if n in persistent]
    if buffers:
        yield _BUFFERS, buffers


def _check(directory: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        check_file(directory, file)


def _trust(directory: Path, manifest: Manifest) -> None:
    """Take the files as they are: what is read from them is compared with its checksum anyway."""


def _check_fits(
    directory: Path, manifest: Manifest, targets: dict[str, Named], model: nn.Module
) -> None:
    saved = {
        entry.name: (dtype_of(entry), entry.shape)
        for file in manifest.files
        if file.name != _RANDOM
        for entry in file.tensors
    }
    wanted = {
        name: (tensor.dtype, tuple(tensor.shape))
        for tensors in targets.values()
        for name, tensor in tensors
    }
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


def _restore(
    directory: Path,
    manifest: Manifest,
    targets: dict[str, Named],
    model: nn.Module,
    optimizer: AdamW,
) -> None:
    engine = engine_of(model)
    engine.synchronize()
    places = {name: tensor for tensors in targets.values() for name, tensor in tensors}
    files = [file for file in manifest.files if file.name != _RANDOM]
    with torch.no_grad():
        for weights in (True, False):  # writing weights clears the remainders, so those come after
            for file in files:
                chosen = [e.name for e in file.tensors if e.name.endswith(f".{_WEIGHT}") == weights]
                read_tensors(directory, file, ((name, places[name]) for name in chosen))
            if weights:
                engine.weights_replaced()
    optimizer.resume(manifest.step, manifest.values["optimizer"])
    _restore_random(directory, manifest)


def _restore_random(directory: Path, manifest: Manifest) -> None:
    random_file = next(file for file in manifest.files if file.name == _RANDOM)
    states = {e.name: torch.empty(e.shape, dtype=dtype_of(e)) for e in random_file.tensors}
    read_tensors(directory, random_file, states.items())
    restore_random(states, manifest.values["random"])
