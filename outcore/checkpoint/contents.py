"""What a checkpoint holds: which tensors in which file, and the values beside them.

Tensors are stored parameter by parameter, so that a checkpoint knows nothing of homes. Parameters
that are not trained are not in it: they come from the model's own directory, and only a fingerprint
of them is kept, so that a run does not go on over another base model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outcore.checkpoint.random_states import random_values
from outcore.checkpoint.tensor_file import Layout
from outcore.engine.offload import engine_of
from outcore.optim.adamw import AdamW
from outcore.optim.state import UnitState
from outcore.stream.unit import Unit

BUFFERS = "buffers.safetensors"
RANDOM = "random.safetensors"
WEIGHT = "weight"
_EXTRA_BYTES = 1 << 20  # random states and the manifest
_FINGERPRINT_ELEMENTS = 256  # of each frozen tensor: other weights differ early

Named = list[tuple[str, Tensor]]


def trained_units(model: nn.Module) -> list[Unit]:
    return [unit for unit in engine_of(model).units if unit.layout.trainable_numel]


def unit_file(unit: Unit) -> str:
    return f"unit-{unit.index:05d}.safetensors"


def unit_tensors(unit: Unit, state: UnitState, optimizer: AdamW) -> Named:
    """Return the tensors of one unit as views of ``state``, its home or a copy of it."""
    tensors: Named = []
    for field in unit.layout.trainable:
        full = unit.full_name(field.name)
        weight = state.weight[field.offset : field.end].view(field.shape)
        tensors.append((f"{full}.{WEIGHT}", weight))
        if unit.parameters[field.name] not in optimizer.state:
            continue  # trained by somebody else
        for kind, flat in state.named():
            cut = flat[field.offset // kind.per : -(-field.end // kind.per)]
            tensors.append((f"{full}.{kind.name}", cut.view(field.shape) if kind.per == 1 else cut))
    return tensors


def persistent_buffers(model: nn.Module) -> Named:
    persistent = model.state_dict(keep_vars=True)
    return [(name, b) for name, b in model.named_buffers() if name in persistent]


def home_tensors(
    model: nn.Module, optimizer: AdamW, *, checked: bool = False
) -> Iterator[tuple[str, Named]]:
    """Yield the file and the tensors of each unit and of the buffers, all views of their homes.

    ``checked``: those on disk are compared with their checksums before they are yielded.
    """
    backend = engine_of(model).backend
    for unit in trained_units(model):
        if checked:
            backend.check_on_disk(unit)
        yield unit_file(unit), unit_tensors(unit, backend.states[unit.index], optimizer)
    buffers = persistent_buffers(model)
    if buffers:
        yield BUFFERS, buffers


def checkpoint_bytes(model: nn.Module, optimizer: AdamW) -> int:
    """Return what a checkpoint takes on disk."""
    files = home_tensors(model, optimizer)
    return _EXTRA_BYTES + sum(Layout.of(tensors).num_bytes for _, tensors in files)


def plain_values(
    model: nn.Module, optimizer: AdamW, run: dict[str, Any], *, frozen: str
) -> dict[str, Any]:
    """Return all that is not a tensor, as it is now; ``run`` must be plain JSON."""
    try:
        run = json.loads(json.dumps(run, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the values of a checkpoint must be plain JSON: {error}") from error
    return {
        "run": run,
        "optimizer": [_as_numbers(group) for group in optimizer.hyperparameters()],
        "step_counts": optimizer.step_counts(),
        "num_skipped_steps": optimizer.num_skipped_steps,
        "state_format": engine_of(model).options.state_format.name,
        "frozen": frozen,
        "random": random_values(),
    }


def frozen_fingerprint(model: nn.Module) -> str:
    return fingerprint(model, with_trained=False)


def fingerprint(model: nn.Module, *, with_trained: bool) -> str:
    """Return a digest of names, types, shapes and first elements of frozen parameters.

    with_trained: of all others too, which nothing may be updating.
    """
    digest = hashlib.sha256()
    for unit in engine_of(model).units:
        for field in unit.layout.fields:
            if field.trainable and not with_trained:
                continue
            values = unit.parameters[field.name].detach()
            name = unit.full_name(field.name)
            digest.update(f"{name} {values.dtype} {list(field.shape)}\n".encode())
            if not values.is_meta:  # else in the packed span
                _add_first(digest, values)
        if unit.packed is not None:
            _add_first(digest, unit.packed_span(unit.home))
    return digest.hexdigest()


def _add_first(digest: Any, values: Tensor) -> None:
    first = values.reshape(-1)[:_FINGERPRINT_ELEMENTS].cpu()
    digest.update(first.view(torch.uint8).numpy().tobytes())


def _as_numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}
