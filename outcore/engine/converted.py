"""Checkpoints with other names or shapes than the model's: transformers converts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from outcore.errors import StoreError
from outcore.model_config import first_line

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


def converted(auto: Any, directory: Path) -> nn.Module:
    """Return the whole model as transformers makes it of the directory."""
    try:
        model: nn.Module = auto.from_pretrained(
            directory, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # mismatched shapes, missing weights, conversions that fail
        raise StoreError(
            f"{directory}: its weights are not those of its config ({first_line(error)})",
            path=directory,
        ) from error
    return model
