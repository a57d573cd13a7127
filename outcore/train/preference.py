"""Preference tuning (DPO): answers that were chosen against those that were rejected.

The reference is the model as it was. With adapters it is the same model with them switched off, so
the streamed base serves both. Without, its log-probabilities are taken before the first step, for
every batch that will come, and kept in a file: no second model is ever in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from outcore.checkpoint.contents import fingerprint
from outcore.data.batches import Batch, Batches
from outcore.engine.offload import engine_of
from outcore.train.output_directory import writing


class Reference(Protocol):
    """The log-probabilities of a batch's rows under the reference."""

    def logps(self, model: Any, batch: Batch, number: int) -> Tensor: ...


def sequence_logps(model: Any, batch: Batch) -> Tensor:
    """Return the summed log-probability of each row's answer, (rows,)."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    target = batch["labels"][:, 1:]
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        reduction="none",
        ignore_index=-100,
    )
    return -losses.view(target.shape).float().sum(-1)


def dpo_loss(policy: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss, and the share of pairs in which the chosen answer gained more.

    Rows are chosen and rejected in turns.
    """
    gained = policy - reference
    margin = gained[0::2] - gained[1::2]
    return -F.logsigmoid(beta * margin).mean(), (margin > 0).float().mean()


class AdaptersOff:
    """The model without its adapters is the reference."""

    @torch.no_grad()
    def logps(self, model: Any, batch: Batch, number: int) -> Tensor:
        with model.disable_adapter(), evaluating(model):
            return sequence_logps(model, batch)


class Precomputed:
    """What the model said before it was trained, row by row of every batch."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows  # (batches, rows)

    def logps(self, model: Any, batch: Batch, number: int) -> Tensor:
        size = batch["input_ids"].shape[0]
        return self._rows[number, :size].to(engine_of(model).device)


@torch.no_grad()
def precomputed(
    model: Any,
    batches: Batches,
    num_batches: int,
    path: Path,
    progress: Callable[[int, int], None],
) -> Precomputed:
    """Return the reference of all batches, from its file where that is whole."""
    identity = {name: str(value) for name, value in batches.state_dict().items()}
    identity.pop("next_batch")
    # A run that left no checkpoint may have left its reference, and have been of another model.
    identity["model"] = fingerprint(model, with_trained=True)
    rows = _read(path, identity, num_batches)
    if rows is None:
        device = engine_of(model).device
        width = 2 * batches.options.batch_size
        rows = torch.zeros(num_batches, width)
        with evaluating(model):
            for number in range(num_batches):
                progress(number, num_batches)
                batch = {k: v.to(device) for k, v in batches.batch(number).items()}
                found = sequence_logps(model, batch).cpu()
                rows[number, : len(found)] = found
        beside = path.with_suffix(".new")
        with writing(path):
            save_file({"logps": rows}, beside, metadata=identity)
            beside.replace(path)
    return Precomputed(rows)


def _read(path: Path, identity: dict[str, str], num_batches: int) -> Tensor | None:
    from safetensors import safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() != identity:
                return None
        rows: Tensor = load_file(path)["logps"]
    except (SafetensorError, KeyError):
        return None
    return rows if len(rows) >= num_batches else None


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout, and with logits in chunks although nothing is differentiated."""
    engine, was_training = engine_of(model), model.training
    model.eval()
    engine.always_defers_logits = True
    try:
        yield
    finally:
        engine.always_defers_logits = False
        model.train(was_training)
