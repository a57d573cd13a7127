"""Shapes: the published dimensions of well-known models, without their weights.

Owns one small JSON file a model (a Hugging Face configuration with its `model_type`) and the two
ways to read them. Planning, benchmarks and tests take a model's shape from here, so that nothing
has to be downloaded.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from transformers import AutoConfig, PretrainedConfig

__all__ = ["config_from_dict", "shape_config", "shape_dict", "shape_names"]

_SUFFIX = ".json"


def shape_names() -> list[str]:
    """The names that `shape_config` knows, sorted."""
    names = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def shape_dict(name: str, **overrides: Any) -> dict[str, Any]:
    """The configuration of `name` as plain values, with `overrides` on top of it."""
    if name not in shape_names():
        raise ValueError(f"no shape named {name!r}; known: {', '.join(shape_names())}")
    text = resources.files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    shape: dict[str, Any] = json.loads(text)
    return {**shape, **overrides}


def shape_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The configuration of `name`; `overrides` change fields, e.g. `tie_word_embeddings=False`."""
    return config_from_dict(shape_dict(name, **overrides))


def config_from_dict(config: Mapping[str, Any]) -> PretrainedConfig:
    """A configuration object from plain values, which must name their `model_type`."""
    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError("a model configuration needs a model_type, e.g. 'qwen2'")
    built = AutoConfig.for_model(model_type, **fields)
    assert isinstance(built, PretrainedConfig)
    return built
