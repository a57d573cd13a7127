"""Checkpoints with other names or shapes than the model's: transformers converts them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from outcore.blocks import end_module, find_parts
from outcore.errors import StoreError
from outcore.model_config import first_line
from outcore.weights.unused_tensors import some_of, tell_unused

_SPARE_ELEMENTS = 1 << 20  # a new head, or buffers that are not stored


def check_size(model: nn.Module, num_elements: int, directory: Path) -> None:
    """Refuse a model far larger than its files, before any of it is allocated."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    if numel > 2 * num_elements + _SPARE_ELEMENTS:
        raise StoreError(
            f"{directory}: its config describes {numel:,} parameters, its files hold "
            f"{num_elements:,} numbers",
            path=directory,
        )


def converted(
    auto: Any, directory: Path, *, unlike: str | None, is_whole: bool = True
) -> nn.Module:
    """Return the whole model as transformers makes it of the directory.

    unlike: what to say of shapes where it cannot; its own words are a table in a log.
    is_whole: whether all that the files hold should have a place in the model.
    Transformers draws what the files do not hold. That is meant for a new head, which is told here;
    a block or an embedding of random values is refused.
    """
    model: nn.Module
    try:
        model, found = auto.from_pretrained(
            directory,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # mismatched shapes, missing weights, conversions that fail
        raise StoreError(
            f"{directory}: its weights are not those of its config ({unlike or first_line(error)})",
            path=directory,
        ) from error
    missing = sorted(found["missing_keys"])
    needed = sorted(_needed_names(model).intersection(missing))
    if needed:
        raise StoreError(
            f"{directory}: its files have no weights for {some_of(needed)}, which its config "
            "describes. Is it the config of another model, or is a file missing?",
            path=directory,
        )
    if missing:
        warnings.warn(
            f"{directory} has no weights for {some_of(missing)}: they begin with random values",
            stacklevel=3,
        )
    if is_whole:
        tell_unused(sorted(found["unexpected_keys"]), directory)
    return model


def _needed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters without which there is no pretrained model."""
    needed = [part.module for part in find_parts(model) if part.is_block]
    embedding = end_module(model, "input")
    if embedding is not None:
        needed.append(embedding)
    ids = {id(parameter) for module in needed for parameter in module.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in ids}
