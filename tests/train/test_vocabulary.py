"""Tokens that the model does not know are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers_made_here import CHATML, make_tokenizer, write_jsonl
from train_files import Files
from transformers import LlamaConfig, LlamaForCausalLM

from outcore.data.batches import Batches, BatchOptions
from outcore.data.tokenize import tokenize
from outcore.train import subject
from outcore.train.display import Display
from outcore.train.run import train
from outcore.train.vocabulary import within_vocabulary


@pytest.fixture
def made(tmp_path: Path) -> tuple[Any, Any]:
    tokenizer = make_tokenizer(CHATML)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "the cat"}, {"text": "sat on the mat"}])
    cache = tokenize([str(data)], tokenizer, cache_dir=tmp_path / "tokens", num_workers=1)
    return cache, tokenizer


def test_a_token_of_the_data_that_the_model_lacks_is_named(made: tuple[Any, Any]) -> None:
    cache, tokenizer = made
    largest = max(int(cache.ids(0, cache.num_tokens).max()), cache.pad_token_id)
    within_vocabulary(cache, tokenizer, largest + 1)
    with pytest.raises(ValueError, match=f"token {largest} .*0 to {largest - 1}: .*resize_token"):
        within_vocabulary(cache, tokenizer, largest)


def test_a_token_that_only_the_tokenizer_has_is_none_of_the_data(made: tuple[Any, Any]) -> None:
    cache, tokenizer = made
    tokenizer.add_tokens(["<never>"])
    within_vocabulary(cache, tokenizer, len(tokenizer) - 1)
    within_vocabulary(cache, tokenizer, None)


def test_a_padding_token_that_the_model_lacks_is_stood_in_for(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "the cat"}, {"text": "sat on the mat"}])
    cache = tokenize([str(data)], tokenizer, cache_dir=tmp_path / "tokens", num_workers=1)
    size = len(tokenizer) - 1
    assert within_vocabulary(cache, tokenizer, size + 1).pad_token_id == size
    known = within_vocabulary(cache, tokenizer, size)
    options = BatchOptions(batch_size=1, seq_len=32, num_epochs=1)
    with Batches(known, options) as batches:
        assert max(int(batch["input_ids"].max()) for batch in batches) < size
    assert known.checksum == cache.checksum


def test_a_run_with_another_models_tokenizer_loads_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig.from_pretrained(files.model)
    config.vocab_size, config.eos_token_id, config.pad_token_id = 260, 1, 1
    LlamaForCausalLM(config).save_pretrained(files.folder / "small")
    monkeypatch.setattr(subject, "make_model", lambda *_: pytest.fail("it was loaded"))
    settings = files.settings(model=str(files.folder / "small"), tokenizer=str(files.model))
    with pytest.raises(ValueError, match="the model only tokens 0 to 259"):
        train(settings, Display(Console(quiet=True)))
