"""Whether the tokens of the data are tokens of the model.

A GPU ends the process at one that is not, without saying which; that may come late in a run.
"""

from __future__ import annotations

from typing import Any

from outcore.data.token_cache import TokenCache

_READ_TOKENS = 1 << 22


def within_vocabulary(cache: TokenCache, tokenizer: Any, vocabulary_size: int | None) -> TokenCache:
    """Return the cache; ValueError for a token that the model has no embedding of.

    Where that is the tokenizer's padding token, which nothing attends to, another one takes its
    place. All tokens are looked at only where the tokenizer has more than the model: some have one
    that never comes up.
    """
    if vocabulary_size is None or max(tokenizer.get_vocab().values(), default=0) < vocabulary_size:
        return cache
    starts = range(0, cache.num_tokens, _READ_TOKENS)
    largest = max(int(cache.ids(start, _READ_TOKENS).max()) for start in starts)
    if largest >= vocabulary_size:
        raise ValueError(
            f"the data has the token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), the "
            f"model only tokens 0 to {vocabulary_size - 1}: the tokenizer is another model's, or "
            "has new tokens, for which model.resize_token_embeddings makes room"
        )
    return cache if cache.pad_token_id < vocabulary_size else cache.padded_with(0)
