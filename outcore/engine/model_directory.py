"""The configuration of a model directory, read with limits; none of the directory's code is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from outcore.errors import StoreError

_MOST_BYTES = 64 << 20
_SPARE_ELEMENTS = 1 << 20  # a new head, or buffers that are not stored


def read_config(directory: Path) -> Any:
    """Return the directory's configuration; StoreError says what is wrong with it."""
    from transformers import AutoConfig

    path = directory / "config.json"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise StoreError(f"{path}: more than {_MOST_BYTES >> 20} MiB", path=path)
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}", path=path) from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: is no JSON: {error}", path=path) from error
    if not isinstance(values, dict):
        raise StoreError(f"{path}: is no table of settings", path=path)
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever its classes raise about values of a wrong type or size
        raise StoreError(
            f"{path}: transformers cannot use it ({_first_line(error)})", path=path
        ) from error


def check_layers(config: Any, num_tensors: int, directory: Path) -> None:
    """Refuse more layers than tensors, before a model of that many is built."""
    text = config.get_text_config()
    for settings in {id(c): c for c in (config, text)}.values():
        for name, value in vars(settings).items():
            if name.endswith("layers") and type(value) is int and value > num_tensors:
                raise StoreError(
                    f"{directory}: its config asks for {name}={value:,}, its files hold "
                    f"{num_tensors:,} tensors",
                    path=directory,
                )


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
    """Return the whole model as transformers converts it from other names or shapes."""
    try:
        model: nn.Module = auto.from_pretrained(
            directory, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # mismatched shapes, missing weights, conversions that fail
        raise StoreError(
            f"{directory}: its weights are not those of its config ({_first_line(error)})",
            path=directory,
        ) from error
    return model


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
