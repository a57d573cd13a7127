"""The configuration of a model directory, read with limits; none of the directory's code is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outcore.errors import StoreError
from outcore.limited_json import read_limited

MOST_LAYERS = 10_000
_MOST_BYTES = 20 << 20  # of memory; transformers makes some copies
# Of which transformers makes a list of as many as soon as it reads the settings.
_MOST = {
    re.compile(r"layers$|^n_layer$|^attention_types$"): MOST_LAYERS,
    re.compile("labels$"): 100_000,
}


def read_config(file: Path) -> Any:
    """Return the configuration in a JSON file; StoreError says what is wrong with it."""
    from transformers import AutoConfig

    values = _read_settings(file)
    try:
        _refuse_kernels(values)
        _refuse_counts(values)
        config = AutoConfig.from_pretrained(file, trust_remote_code=False)
        config.name_or_path = str(file.parent)  # what is saved names the model, not its config
        check_layers(config)
    except Exception as error:  # whatever its classes raise about values of a wrong type or size
        raise StoreError(f"{file}: cannot be used ({first_line(error)})", path=file) from error
    return config


def check_counts(file: Path) -> None:
    """Refuse a configuration that would fill the memory as soon as transformers reads it."""
    _refuse_counts(_read_settings(file))


def read_generation_config(directory: Path) -> Any:
    """Return the settings of generation that lie beside a model; None if there are none."""
    from transformers import GenerationConfig

    file = directory / "generation_config.json"
    if not file.is_file():
        return None
    _read_settings(file)
    try:
        return GenerationConfig.from_pretrained(directory)
    except Exception as error:  # as above
        raise StoreError(
            f"{file}: cannot be used ({first_line(error)}); without it, the model has the usual "
            "settings",
            path=file,
        ) from error


def _read_settings(file: Path) -> dict[str, Any]:
    """Return the table in a JSON file, before any library reads it."""
    try:
        values = read_limited(file, most_bytes=_MOST_BYTES)
    except OSError as error:
        raise StoreError(f"{file}: cannot be read: {error.strerror}", path=file) from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{file}: is no JSON of settings: {error}", path=file) from error
    if not isinstance(values, dict):
        raise StoreError(f"{file}: is no table of settings", path=file)
    return values


def _refuse_kernels(values: Any, key: str = "") -> None:
    """Refuse settings that name code on the Hub, such as ``"_attn_implementation": "org/name"``."""
    if isinstance(values, dict):
        for name, value in values.items():
            # Also in a table of one for each part of the model.
            _refuse_kernels(value, name if "implementation" in name else key)
    elif key and isinstance(values, str) and "/" in values:
        raise ValueError(f"{key} asks for code from elsewhere, {values!r}")


def _refuse_counts(values: Any, key: str = "") -> None:
    """Refuse numbers of layers and labels that memory would be taken for before anyone looks."""
    if isinstance(values, dict):
        for name, value in values.items():
            _refuse_counts(value, name)
    elif isinstance(values, list):
        for value in values:
            _refuse_counts(value, key)
    elif isinstance(values, int):
        most = next((most for name, most in _MOST.items() if name.search(key)), values)
        if values > most:
            raise ValueError(f"{key} is {values:,}, but models have {most:,} at most")


def check_layers(config: Any) -> None:
    """Refuse what would take hours to build, even without values, or cannot be built."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if layers is None:
        return
    if not isinstance(layers, int):  # older transformers take any type
        raise ValueError(f"num_hidden_layers is {layers!r}, which is no number")
    if layers > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers is {layers:,}, but models have {MOST_LAYERS:,} at most"
        )


def longest_sequence(config: Any) -> int | None:
    """Return how many positions the model was made for, where its configuration says so."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def vocabulary_size(config: Any) -> int | None:
    """Return how many tokens the model knows, where its configuration says so."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


def too_long(seq_len: int, longest: int | None) -> str | None:
    """Return the words for sequences that are longer than the model was made for."""
    if longest is None or seq_len <= longest:
        return None
    return f"sequences of {seq_len:,} tokens, but the model was made for {longest:,}"


def first_line(error: Exception) -> str:
    """Return what an error says first; a line that ends with a colon is not yet it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
