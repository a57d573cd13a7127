"""The data of a run: files tokenised once, and the batches of training and evaluation."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.data.batches import Batches, BatchOptions
from outcore.data.encode import EncodeOptions
from outcore.data.split import split_held_out
from outcore.data.token_cache import TokenCache
from outcore.data.tokenize import Progress, tokenize
from outcore.train.settings import TrainSettings
from outcore.train.vocabulary import within_vocabulary

CACHE_FOLDER = "tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Batches to train on, without end or counted, and those to evaluate on, once through."""

    cache: TokenCache
    training: Batches
    evaluation: Callable[[], Batches] | None
    held_out: dict[str, float]  # what tells held-out losses from others; empty without any
    num_steps: int

    @property
    def is_pairs(self) -> bool:
        return self.cache.documents_per_example == 2

    @property
    def held_out_checksum(self) -> str:
        """What differs where ``held_out`` does, in eight digits."""
        return f"{zlib.crc32(json.dumps(self.held_out, sort_keys=True).encode()):08x}"

    def close(self) -> None:
        self.training.close()


def make_corpus(
    settings: TrainSettings,
    tokenizer: Any,
    progress: Callable[[Progress], None] | None = None,
    *,
    vocabulary_size: int | None = None,
) -> Corpus:
    """Tokenise what is not in the cache yet, and arrange it in batches.

    vocabulary_size: how many tokens the model knows, others are refused; None does not look.
    """
    assert settings.seq_len is not None
    cache = _tokens(settings, settings.data, tokenizer, progress)
    cache = within_vocabulary(cache, tokenizer, vocabulary_size)
    examples, held_out = None, None
    if settings.held_out:
        examples, held_out = split_held_out(cache, settings.held_out)
    batch_size = max(1, settings.tokens_per_step // settings.seq_len)
    is_pairs = cache.documents_per_example == 2
    if is_pairs:
        batch_size = max(1, batch_size // 2)
    packing = None if is_pairs else settings.packing
    options = BatchOptions(
        batch_size=batch_size,
        seq_len=settings.seq_len,
        packing=packing,
        seed=settings.seed,
        num_epochs=None if settings.max_steps else settings.epochs or 1.0,
    )
    training = Batches(cache, options, examples=examples)
    num_steps = settings.max_steps or training.num_batches
    assert num_steps is not None
    once = BatchOptions(
        batch_size=batch_size,
        seq_len=settings.seq_len,
        packing=packing,
        shuffle=False,
        num_epochs=1,
    )
    evaluation: Callable[[], Batches] | None = None
    if settings.eval_data:
        eval_cache = _tokens(settings, settings.eval_data, tokenizer, progress)
        eval_cache = within_vocabulary(eval_cache, tokenizer, vocabulary_size)
        if eval_cache.documents_per_example != cache.documents_per_example:
            raise ValueError(
                f"data holds rows of {cache.row_format}, eval_data of {eval_cache.row_format}: "
                "either both are preference pairs, or none"
            )
        evaluation = lambda: Batches(eval_cache, once)  # noqa: E731
    elif held_out is not None:
        evaluation = lambda: Batches(cache, once, examples=held_out)  # noqa: E731
    return Corpus(
        cache=cache,
        training=training,
        evaluation=evaluation,
        held_out={} if evaluation is None else _identity(evaluation, settings, is_pairs=is_pairs),
        num_steps=num_steps,
    )


def _identity(
    evaluation: Callable[[], Batches], settings: TrainSettings, *, is_pairs: bool
) -> dict[str, float]:
    """Return what losses of them depend on, beside the model; refuse, before training starts, what
    could not be evaluated after it."""
    name = "eval_data" if settings.eval_data else "held_out"
    try:
        with contextlib.closing(evaluation()) as batches:
            told: dict[str, float] = dict(batches.state_dict())
            del told["next_batch"]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return {**told, "dpo_beta": settings.dpo_beta} if is_pairs else told


def _tokens(
    settings: TrainSettings,
    paths: tuple[str, ...],
    tokenizer: Any,
    progress: Callable[[Progress], None] | None,
) -> TokenCache:
    return tokenize(
        list(paths),
        tokenizer,
        cache_dir=Path(settings.cache_dir or Path(settings.output) / CACHE_FOLDER),
        options=EncodeOptions(
            row_format=settings.row_format,
            loss_on=settings.loss_on,
            on_bad_row="skip" if settings.skip_bad_rows else "raise",
        ),
        num_workers=settings.num_workers,
        progress=progress,
    )
