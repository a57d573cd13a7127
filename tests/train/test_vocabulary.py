"""Tokens that the model does not know are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers_made_here import CHATML, make_tokenizer, write_jsonl

from outcore.data.tokenize import tokenize
from outcore.train.vocabulary import check_vocabulary


@pytest.fixture
def made(tmp_path: Path) -> tuple[Any, Any]:
    tokenizer = make_tokenizer(CHATML)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "the cat"}, {"text": "sat on the mat"}])
    cache = tokenize([str(data)], tokenizer, cache_dir=tmp_path / "tokens", num_workers=1)
    return cache, tokenizer


def test_a_token_of_the_data_that_the_model_lacks_is_named(made: tuple[Any, Any]) -> None:
    cache, tokenizer = made
    largest = max(int(cache.ids(0, cache.num_tokens).max()), cache.pad_token_id)
    check_vocabulary(cache, tokenizer, largest + 1)
    with pytest.raises(ValueError, match=f"token {largest} .*0 to {largest - 1}: .*resize_token"):
        check_vocabulary(cache, tokenizer, largest)


def test_a_token_that_only_the_tokenizer_has_is_none_of_the_data(made: tuple[Any, Any]) -> None:
    cache, tokenizer = made
    tokenizer.add_tokens(["<never>"])
    check_vocabulary(cache, tokenizer, len(tokenizer) - 1)
    check_vocabulary(cache, tokenizer, None)
