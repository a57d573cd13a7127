"""Preference tuning (DPO): answers that were chosen against those that were rejected.

The reference is the model as it was. With adapters it is the same model with them switched off, so
the streamed base serves both. Without, its log-probabilities are taken before the first step, for
every batch that will come, and kept in a file, also on the way: no second model is ever in memory.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from outcore.checkpoint.contents import fingerprint
from outcore.data.batches import Batch, Batches
from outcore.data.durable_files import replace_file
from outcore.engine.offload import engine_of

_WRITE_EVERY_S = 60.0  # about what a kill in the pass before the first step costs


class Reference(Protocol):
    """The log-probabilities of a batch's rows under the reference."""

    def logps(self, model: Any, batch: Batch, number: int) -> Tensor: ...


def sequence_logps(model: Any, batch: Batch) -> Tensor:
    """Return the summed log-probability of each row's answer, (rows,)."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    # In bf16 each token would be rounded to 8 bits, and an answer is the sum of hundreds.
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    target = batch["labels"][:, 1:]
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        reduction="none",
        ignore_index=-100,
    )
    return -losses.view(target.shape).sum(-1)


REWARDS = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
"""What is told beside the loss, under the names that TRL has for it."""


def dpo_loss(policy: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, ...]:
    """Return the loss and the ``REWARDS``, means over the pairs.

    An answer's reward is what its log-probability gained, times beta; accuracy is the share of
    pairs in which the chosen answer has more. Rows are chosen and rejected in turns.
    """
    gained = policy - reference
    chosen, rejected = beta * gained.detach()[0::2], beta * gained.detach()[1::2]
    rewards = ((chosen > rejected).float(), chosen - rejected, chosen, rejected)
    loss = -F.logsigmoid(beta * (gained[0::2] - gained[1::2])).mean()
    return loss, *(reward.mean() for reward in rewards)


class AdaptersOff:
    """The model without its adapters is the reference."""

    @torch.no_grad()
    def logps(self, model: Any, batch: Batch, number: int) -> Tensor:
        with model.disable_adapter(), evaluating(model):
            return sequence_logps(model, batch)


class Precomputed:
    """What the model said before it was trained, row by row of every batch."""

    def __init__(self, rows: Tensor, width: int) -> None:
        self._rows = rows  # of one batch behind those of another: (rows,)
        self._width = width  # of every batch but the last

    def logps(self, model: Any, batch: Batch, number: int) -> Tensor:
        first = number * self._width
        rows = self._rows[first : first + batch["input_ids"].shape[0]]
        return rows.to(engine_of(model).device)


@torch.no_grad()
def precomputed(
    model: Any,
    batches: Batches,
    num_batches: int,
    path: Path,
    progress: Callable[[int, int], None],
    stops: Callable[[], bool],
) -> Precomputed | None:
    """Return the reference of all batches; None if ``stops`` says so behind one of them.

    What its file has is not computed again, and what is computed comes into it on the way.
    """
    identity = {name: str(value) for name, value in batches.state_dict().items()}
    identity.pop("next_batch")
    # A run that left no checkpoint may have left its reference, and have been of another model.
    identity["model"] = fingerprint(model, with_trained=True)
    width = 2 * batches.options.batch_size
    # The last batch of a run may be smaller, and is whole in one that goes on for longer.
    num_rows = (num_batches - 1) * width + len(batches.batch(num_batches - 1)["input_ids"])
    rows = _read(path, identity)
    if len(rows) >= num_rows:
        return Precomputed(rows, width)
    done = len(rows) // width * width  # behind the last whole batch
    rows = F.pad(rows[:done], (0, num_rows - done))
    device, written_s = engine_of(model).device, time.perf_counter()
    with evaluating(model):
        for number in range(done // width, num_batches):
            progress(number, num_batches)
            batch = {k: v.to(device) for k, v in batches.batch(number).items()}
            found = sequence_logps(model, batch).cpu()
            rows[done : done + len(found)] = found
            done += len(found)
            is_stopped = stops()
            if is_stopped or done == num_rows or time.perf_counter() - written_s >= _WRITE_EVERY_S:
                said = {**identity, "crc32": _checksum(rows[:done])}
                replace_file(path, save({"logps": rows[:done]}, said))
                written_s = time.perf_counter()
            if is_stopped:
                return None
    return Precomputed(rows, width)


def _read(path: Path, identity: dict[str, str]) -> Tensor:
    """Return the rows in the file, the first batch's first; none that are not of these batches."""
    from safetensors import safe_open

    if not path.is_file():
        return torch.empty(0)
    with contextlib.suppress(SafetensorError, KeyError, ValueError):
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
        checksum = metadata.pop("crc32", None)
        rows: Tensor = load_file(path)["logps"]
        is_row = rows.dtype == torch.float32 and rows.dim() == 1
        if is_row and metadata == identity and checksum == _checksum(rows):
            return rows
    warnings.warn(
        f"{path} is damaged, or of another model or other data: what the model says before "
        "training is computed anew",
        stacklevel=2,
    )
    return torch.empty(0)


def _checksum(rows: Tensor) -> str:
    return str(zlib.crc32(rows.numpy().tobytes()))


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout, and with logits in chunks although nothing is differentiated."""
    engine, was_training = engine_of(model), model.training
    deferred = engine.always_defers_logits  # an evaluation may ask for its reference within
    model.eval()
    engine.always_defers_logits = True
    try:
        yield
    finally:
        engine.always_defers_logits = deferred
        model.train(was_training)
