"""How large a step may be, before any number is computed with."""

from __future__ import annotations

from typing import Any

MOST_TOKENS = 1 << 28  # a step; more is a mistake, and the arithmetic of plans is for less


def check_step_size(tokens: Any, seq_len: Any) -> None:
    """Refuse what is no number of tokens, or no step of whole sequences."""
    for name, value in (("tokens", tokens), ("seq_len", seq_len)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}")
    for name, value in (("seq_len", seq_len), ("tokens", tokens)):
        if value > MOST_TOKENS:
            raise ValueError(f"{name} is {value:,}, {too_many()}")
    if tokens % seq_len:
        below = tokens // seq_len * seq_len
        nearest = f"{below:,} or {below + seq_len:,}" if below else f"{seq_len:,}"
        raise ValueError(
            f"tokens ({tokens:,}) must be a multiple of seq_len ({seq_len:,}), such as {nearest}: "
            "a step has whole sequences"
        )


def too_many() -> str:
    return (
        f"but a step of at most {MOST_TOKENS:,} tokens can be planned: give the tokens of one "
        "optimizer step, not of the whole training"
    )
