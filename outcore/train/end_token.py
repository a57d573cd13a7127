"""The token with which what is learned ends: whoever generates with the model is to stop there.

A base model's chats often end in another token than its texts did, and what it is saved with names
the old one alone: it would answer, say its new end, and go on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from outcore.data.token_cache import TokenCache

_NUM_LOOKED_AT = 256  # documents, from all over the data
_BEHIND_THE_END = 3  # tokens: many templates write a newline there


def learned_end(cache: TokenCache, tokenizer: Any) -> int | None:
    """Return the special token in which most documents end, of what counts for the loss."""
    special = {*tokenizer.all_special_ids}
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    count = min(_NUM_LOOKED_AT, len(cache.ends))
    found = Counter(
        _end_of(cache, int(document), special)
        for document in np.linspace(0, len(cache.ends) - 1, count).astype(np.int64)
    )
    (end, times), *_ = found.most_common(1)
    return end if 2 * times > count else None


def _end_of(cache: TokenCache, document: int, special: set[int]) -> int | None:
    start, end = int(cache.starts[document]), int(cache.ends[document])
    (counted,) = np.nonzero(cache.counts(start, end - start))
    if not len(counted):
        return None
    behind = start + int(counted[-1]) + 1
    first = max(start + int(counted[0]), behind - 1 - _BEHIND_THE_END)
    last_ones: list[int] = cache.ids(first, behind - first).tolist()
    return next((token for token in reversed(last_ones) if token in special), None)


def stop_where_data_ends(
    model: Any, cache: TokenCache, tokenizer: Any, *, only_adapters: bool
) -> str | None:
    """Have the model's configurations name what is learned as its end; return what to say of it.

    only_adapters: the model is saved without its configurations.
    """
    end = learned_end(cache, tokenizer)
    config, generation = model.config.get_text_config(), model.generation_config
    known = _as_list(generation.eos_token_id) or _as_list(config.eos_token_id)
    if end is None or end in known:
        return None
    name = tokenizer.convert_ids_to_tokens(end)
    if only_adapters:
        return (
            f"the data ends in {name}, at which the base model does not stop: generate with "
            f"eos_token_id={end}"
        )
    generation.eos_token_id = [end, *known] if known else end
    config.eos_token_id = end
    return f"the data ends in {name}, at which the model did not stop: it is saved as its end"


def _as_list(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]
