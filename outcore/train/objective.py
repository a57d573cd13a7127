"""What is minimised: the next token, or the preference between two answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from outcore.data.batches import Batch
from outcore.train.corpus import Corpus
from outcore.train.preference import (
    REWARDS,
    AdaptersOff,
    Reference,
    dpo_loss,
    precomputed,
    sequence_logps,
)
from outcore.train.settings import TrainSettings

TRAINING_REFERENCE = "reference.safetensors"
HELD_OUT_REFERENCE = "reference-held-out.safetensors"


Values = tuple[Tensor, ...]
"""A loss, and then what an objective's ``figures`` name."""


class Objective(Protocol):
    """From a batch on the device to a loss."""

    counts: str  # what a held-out loss is a mean over: "tokens" or "pairs"
    figures: tuple[str, ...]  # what is told beside the loss

    def values(self, model: Any, batch: Batch, number: int) -> Values:
        """Return those of the ``number``-th training batch."""

    def held_out(self, model: Any, batch: Batch, number: int) -> tuple[Values, int]:
        """Return those of a batch that is evaluated, and over how many things they are means."""


class NextToken:
    """The model's own loss: the mean over the tokens that count."""

    counts = "tokens"
    figures: tuple[str, ...] = ()

    def values(self, model: Any, batch: Batch, number: int) -> Values:
        # With a cache, the default where gradients are off, transformers lets packed documents see
        # each other.
        loss: Tensor = model(**batch, use_cache=False).loss
        return (loss,)

    def held_out(self, model: Any, batch: Batch, number: int) -> tuple[Values, int]:
        count = int((batch["labels"][:, 1:] != -100).sum())
        return self.values(model, batch, number), count


class Preference:
    """DPO; evaluation has a reference of its own."""

    counts = "pairs"
    figures: tuple[str, ...] = REWARDS

    def __init__(self, training: Reference, held_out: Reference | None, beta: float) -> None:
        self._training = training
        self._held_out = held_out
        self._beta = beta

    def values(self, model: Any, batch: Batch, number: int) -> Values:
        return self._values(model, batch, self._training.logps(model, batch, number))

    def held_out(self, model: Any, batch: Batch, number: int) -> tuple[Values, int]:
        assert self._held_out is not None
        reference = self._held_out.logps(model, batch, number)
        return self._values(model, batch, reference), batch["input_ids"].shape[0] // 2

    def _values(self, model: Any, batch: Batch, reference: Tensor) -> Values:
        return dpo_loss(sequence_logps(model, batch), reference, self._beta)


def objective_for(
    settings: TrainSettings,
    corpus: Corpus,
    model: Any,
    progress: Callable[[int, int], None],
    stops: Callable[[], bool],
) -> Objective | None:
    """Return what the data asks for; None if ``stops`` says so while a reference is made.

    Called before the first step and before a resume: it may need the model as it was.
    """
    if not corpus.is_pairs:
        return NextToken()
    # As TRL's DPO, without dropout: the reference has none, and what it took would count.
    model.eval()
    if settings.lora:
        return Preference(AdaptersOff(), AdaptersOff(), settings.dpo_beta)
    output = Path(settings.output)
    training = precomputed(
        model, corpus.training, corpus.num_steps, output / TRAINING_REFERENCE, progress, stops
    )
    if training is None:
        return None
    held_out = None
    if corpus.evaluation is not None:
        with corpus.evaluation() as batches:
            assert batches.num_batches is not None
            held_out = precomputed(
                model, batches, batches.num_batches, output / HELD_OUT_REFERENCE, progress, stops
            )
            if held_out is None:
                return None
    return Preference(training, held_out, settings.dpo_beta)
