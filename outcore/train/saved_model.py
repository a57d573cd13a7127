"""A trained model as the files of its directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def save_model(model: Any, directory: Path, *, only_adapters: bool) -> None:
    """Write the model, or its adapters alone, whatever its settings of generation are."""
    with contextlib.nullcontext() if only_adapters else _generation_as_it_is(model, directory):
        model.save_pretrained(directory)


@contextlib.contextmanager
def _generation_as_it_is(model: Any, directory: Path) -> Iterator[None]:
    """Write ``generation_config.json`` also where transformers would not, behind what is done here.

    Some published models have settings that contradict each other, a temperature without sampling.
    Transformers only warns of them when it loads the model, and refuses to save it: of a run, that
    is when all is trained.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None or _is_taken(generation):
        yield
        return
    model.generation_config = type(generation)()
    try:
        yield
    finally:
        model.generation_config = generation
    generation.to_json_file(str(directory / "generation_config.json"), use_diff=True)


def _is_taken(generation: Any) -> bool:
    try:
        generation.validate(strict=True)
    except ValueError:
        return False
    return True
