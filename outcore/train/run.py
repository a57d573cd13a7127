"""A training run, from settings to a model directory; the main path, to be read from the top.

Look at what was asked for, make the data, plan, load; the steps are in ``loop``.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from outcore.data.sources import find_sources
from outcore.determinism import deterministic_algorithms
from outcore.engine.offload import engine_of
from outcore.model_config import longest_sequence, too_long, vocabulary_size
from outcore.named_device import named_device
from outcore.passes.compilation import start_compiler
from outcore.planning.device_type import slower_than_predicted
from outcore.train import subject
from outcore.train.corpus import CACHE_FOLDER, make_corpus
from outcore.train.display import Display
from outcore.train.end_token import stop_where_data_ends
from outcore.train.figures import TrainResult
from outcore.train.loop import Run
from outcore.train.metrics import check_tensorboard
from outcore.train.output_directory import (
    check_apart,
    checkpoints_in,
    remove_if_empty,
)
from outcore.train.packed_documents import keeps_packed_documents_apart
from outcore.train.settings import TrainSettings, with_seq_len

_FEW_STEPS = 10


def train(settings: TrainSettings, display: Display) -> TrainResult:
    """Train as told; a signal ends it after the step in hand, with a checkpoint."""
    with deterministic_algorithms() if settings.deterministic else contextlib.nullcontext():
        return _trained(settings, display)


def _trained(settings: TrainSettings, display: Display) -> TrainResult:
    named_device(settings.device)  # or what follows was done for nothing
    subject.check_disk(settings)
    check_tensorboard(settings.tensorboard)
    named, settings = settings.model, subject.resolved(settings)
    config = subject.config_of(settings)
    subject.check_next_token(settings, config)
    subject.check_rank(settings, config)
    subject.check_targets(settings, config)
    subject.check_dropout(settings, config)
    longest = longest_sequence(config)
    subject.check_positions(settings, config, longest)
    if settings.seq_len is not None and (warning := too_long(settings.seq_len, longest)):
        display.message(warning)
    settings = with_seq_len(settings, longest)
    if settings.packing and not keeps_packed_documents_apart(config):
        display.message(
            "no packing: nothing shows that, in transformers, a model of the type "
            f"{config.model_type} keeps packed documents apart"
        )
        settings = replace(settings, packing=False)
    tokenizer = subject.load_tokenizer(settings)
    if tokenizer.eos_token_id is None and not tokenizer.chat_template:
        display.message(
            "the tokenizer has neither an end token nor a chat template: a model that is trained "
            "so does not learn to end what it says"
        )
    find_sources([*settings.data, *settings.eval_data])  # or a mistyped name leaves a folder behind
    check_apart(settings)
    is_new = not Path(settings.output).exists()
    folder = checkpoints_in(settings)
    try:
        corpus = make_corpus(
            settings, tokenizer, display.tokenising, vocabulary_size=vocabulary_size(config)
        )
    except BaseException:
        folder.close()
        if is_new:
            remove_if_empty(Path(settings.output) / CACHE_FOLDER, Path(settings.output))
        raise
    try:
        display.data(corpus)
        if settings.max_steps is None and corpus.num_steps < _FEW_STEPS:
            display.message("few steps: a smaller --tokens-per-step, or more --epochs, make more")
        sequences = corpus.training.options.batch_size * corpus.cache.documents_per_example
        if warning := _other_step_size(settings, sequences, is_pairs=corpus.is_pairs):
            display.message(warning)
        if settings.micro_batch is not None and settings.micro_batch > sequences:
            display.message(
                f"--micro-batch {settings.micro_batch} is more than a step has: a block works on "
                f"all {sequences} sequences of it at once"
            )
        plan = subject.plan_for(settings, sequences, config, probing=display.probing)
        display.plan(plan, corpus.training.fill)
        device_type = named_device(settings.device).type
        if warning := slower_than_predicted(plan.job.dtype, device_type):
            display.message(warning)
        if device_type == "cuda":
            start_compiler()  # before loading is timed: to import it is no part of that
        with display.loading():
            model = subject.make_model(settings, plan, named)
        said = stop_where_data_ends(model, corpus.cache, tokenizer, only_adapters=settings.lora)
        if said is not None:
            display.message(said)
        try:
            return Run(settings, display, plan, corpus, tokenizer, model, folder).train()
        finally:
            engine_of(model).close()
    finally:
        corpus.close()
        folder.close()


def _other_step_size(settings: TrainSettings, sequences: int, *, is_pairs: bool) -> str | None:
    """Return the words for a step of more or fewer tokens than were asked for."""
    asked, seq_len = settings.tokens_per_step, settings.seq_len
    assert seq_len is not None
    if sequences * seq_len == asked:
        return None
    each = 2 * seq_len if is_pairs else seq_len
    nearest = sorted({max(each, asked // each * each), (asked // each + 1) * each})
    return (
        f"a step has {sequences * seq_len:,} tokens, not {asked:,}: it takes whole "
        f"{'pairs of ' if is_pairs else ''}sequences of {seq_len:,}; --tokens-per-step "
        f"{' or '.join(map(str, nearest))} would be exact"
    )
