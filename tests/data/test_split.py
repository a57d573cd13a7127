"""Held-out examples: the same ones whatever else is in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers_made_here import documents, make_tokenizer, write_jsonl

from outcore.data.split import split_held_out


def test_a_held_out_fraction_is_stable(tmp_path: Path, make_cache: Any) -> None:
    tokenizer = make_tokenizer()
    rows = [{"text": f"document {n}"} for n in range(400)]

    def held_out(path: Path, using: Any = None) -> set[str]:
        cache = make_cache(path, using=using)
        training, held = split_held_out(cache, 0.1)
        assert sorted([*training, *held]) == list(range(cache.num_examples))
        found = documents(cache)
        return {(using or tokenizer).decode(found[index]) for index in held}

    first = held_out(write_jsonl(tmp_path / "a.jsonl", rows))
    assert 20 <= len(first) <= 60
    more = [{"text": f"new {n}"} for n in range(50)]
    moved = held_out(write_jsonl(tmp_path / "b.jsonl", [*more, *reversed(rows), *rows]))
    assert {text for text in moved if text.startswith("document")} == first
    other = make_tokenizer(vocabulary=270)
    assert held_out(tmp_path / "a.jsonl", other) == first


def test_a_split_with_an_empty_side(source: Path, make_cache: Any) -> None:
    cache = make_cache(source)
    with pytest.raises(ValueError, match="leaves one side empty"):
        split_held_out(cache, 1e-9)
    for fraction in (0, 1, -0.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            split_held_out(cache, fraction)
