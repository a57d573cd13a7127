"""Where the model to verify comes from: a Hugging Face directory, the Hub, or a shape that ships.

Every run needs the model anew, so a source makes it as often as asked, with the same values for
the same seed. It also knows what a resident run takes, so that a model that is too large is
refused before anything is trained, and of the Hub before its weights are fetched.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.errors import StoreError
from outcore.model_config import first_line, read_config
from outcore.model_directory import config_directory, is_hub_id, model_directory
from outcore.model_spec import auto_class, model_without_values
from outcore.shapes import shape_config, shape_names

# Weight, gradient, two moments and a second weight (fp32 in plain torch, or master and bf16).
RESIDENT_BYTES_PER_PARAMETER = 20


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be made again and again."""

    name: str
    config: Any
    directory: Path | None  # None: a shape, with random weights, or not fetched yet
    hub_id: str | None = None  # until its weights are fetched

    def fetched(self) -> ModelSource:
        """Return the source with its weights on this machine; ValueError says why not."""
        if self.hub_id is None:
            return self
        directory = model_directory(self.hub_id)
        _check_weights(directory, self.name)
        return replace(self, directory=directory, hub_id=None)

    def make(self, device: str) -> nn.Module:
        """Return the model; a shape's weights are drawn on ``device``, which for a GPU is fast."""
        if self.hub_id is not None:
            return self.fetched().make(device)
        auto = auto_class(self.config)
        config = copy.deepcopy(self.config)  # offloading and training may write into it
        if self.directory is not None:
            model = self._loaded(auto, config)
        else:
            with torch.device(device):
                model = auto.from_config(config)
        assert isinstance(model, nn.Module)
        return model

    def _loaded(self, auto: Any, config: Any) -> Any:
        try:
            return auto.from_pretrained(
                self.directory, config=config, dtype="auto", use_safetensors=True
            )
        except Exception as error:  # whatever its readers raise about files that are torn
            raise StoreError(
                f"{self.directory} cannot be loaded ({first_line(error)})", path=self.directory
            ) from error

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    def num_parameters(self) -> int:
        """Return the number of parameters; ValueError where the configuration makes no model."""
        model = model_without_values(self.config, self.name)
        return sum(parameter.numel() for parameter in model.parameters())

    def resident_bytes(self) -> int:
        """Return about how many bytes a resident run takes, without its activations."""
        return self.num_parameters() * RESIDENT_BYTES_PER_PARAMETER

    def layers_that_fit(self, num_bytes: int) -> int:
        """Return the largest number of layers whose resident run fits into ``num_bytes``."""
        one, two = (self.truncated(n).resident_bytes() for n in (1, 2))
        return max(0, min(self.num_layers, (num_bytes - one) // max(1, two - one) + 1))

    def truncated(self, num_layers: int) -> ModelSource:
        """Return the same model with its first ``num_layers`` layers only."""
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        before = text.num_hidden_layers
        # Per-layer settings, such as which layers have a sliding window, follow.
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(text, name, value[:num_layers])
        text.num_hidden_layers = num_layers
        if getattr(text, "num_decoder_layers", None):  # encoder-decoders count them apart
            text.num_decoder_layers = min(num_layers, text.num_decoder_layers)
        return replace(self, config=config)


def find_model(name: str, *, num_layers: int | None = None) -> ModelSource:
    """Return the source of a directory, id of the Hub or shape; ValueError: what there is instead.

    Of the Hub config.json alone is fetched until the source is.
    """
    source = _find(name)
    if num_layers is None:
        return source
    if not 1 <= num_layers <= source.num_layers:
        raise ValueError(f"{name} has {source.num_layers} layers, {num_layers} were asked for")
    return source.truncated(num_layers)


def _find(name: str) -> ModelSource:
    if name in shape_names() and not Path(name).is_dir():
        return ModelSource(name=name, config=shape_config(name), directory=None)
    is_of_hub = is_hub_id(name)
    directory = config_directory(name)
    if not directory.is_dir():
        raise ValueError(
            f"{name!r} is neither a directory, nor an id of the Hub (org/name), nor a shape. "
            f"Shapes: {', '.join(shape_names())}."
        )
    if not (directory / "config.json").is_file():
        raise ValueError(f"{name} is no Hugging Face model directory: no config.json")
    config = read_config(directory / "config.json")
    if is_of_hub:
        return ModelSource(name=name, config=config, directory=None, hub_id=name)
    _check_weights(directory, name)
    return ModelSource(name=name, config=config, directory=directory)


def _check_weights(directory: Path, name: str) -> None:
    if not any(directory.glob("*.safetensors")):
        raise ValueError(f"{name} has a config.json, but no safetensors files to load")
