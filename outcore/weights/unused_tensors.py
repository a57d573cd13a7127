"""Stored tensors that a model has no place for: blocks or biases that its config does not know.

Without a word the model would be another one than the files are of.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.weights.checkpoint_files import CheckpointFiles
from outcore.weights.stored_layout import Layout

_NO_LONGER_STORED = {"masked_bias"}  # of GPT-2, GPT-Neo and GPT-J: a constant


def unused_tensors(model: Any, files: CheckpointFiles, layout: Layout) -> list[str]:
    """Return the names of what is stored and not loaded, but for what is meant to be left out."""
    used = {piece.name for pieces in layout.values() for piece in pieces}
    # What is computed, and was stored by older versions, in each layer.
    computed = {name.rpartition(".")[2] for name, _ in model.named_buffers()} | _NO_LONGER_STORED
    # What the model's class knows of, such as layers that predict several tokens at once.
    expected = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return [
        name
        for name in sorted(files.shapes())
        if name not in used
        and name.rpartition(".")[2] not in computed
        and not any(re.search(pattern, name) for pattern in expected)
    ]


def tell_unused(names: Sequence[str], directory: Path) -> None:
    if names:
        warnings.warn(
            f"{directory}: its files have weights that its config has no place for, and that are "
            f"left out: {some_of(names)}. Is it the config of another model?",
            stacklevel=3,
        )


def some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
