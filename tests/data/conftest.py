from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cached_rows import ROWS
from tokenizers_made_here import make_tokenizer, write_jsonl

from outcore.data import raw_rows
from outcore.data.encode import EncodeOptions
from outcore.data.token_cache import TokenCache
from outcore.data.tokenize import tokenize

Make = Callable[..., TokenCache]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Without a chat template."""
    return make_tokenizer()


@pytest.fixture
def make_cache(tmp_path: Path, tokenizer: Any) -> Make:
    def make(
        path: Path, *, using: Any = None, num_workers: int | None = 1, **options: Any
    ) -> TokenCache:
        return tokenize(
            path,
            using or tokenizer,
            cache_dir=tmp_path / "cache",
            options=EncodeOptions(**options),
            num_workers=num_workers,
        )

    return make


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", ROWS)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_rows, "_BATCH_ROWS", 7)
