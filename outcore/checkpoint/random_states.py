"""The states of all random generators that a run may draw from, as tensors and plain values."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TORCH = "torch"
_CUDA = "cuda."


def random_tensors() -> list[tuple[str, Tensor]]:
    """Return torch's generators, the host's and each GPU's."""
    tensors = [(_TORCH, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        states = torch.cuda.get_rng_state_all()
        tensors += [(f"{_CUDA}{i}", state) for i, state in enumerate(states)]
    return tensors


def random_values() -> dict[str, Any]:
    """Return the generators of Python and numpy, as JSON has them."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def check_random(tensors: Iterable[tuple[str, Tensor]], values: dict[str, Any]) -> None:
    """Try the states on generators that nobody uses; whatever is wrong with them is raised."""
    random.Random().setstate(_python_state(values))
    np.random.RandomState().set_state(_numpy_state(values))
    names = []
    for name, state in tensors:
        names.append(name)
        if name == _TORCH:
            torch.Generator().set_state(state)
        elif not name.removeprefix(_CUDA).isdecimal() or state.dtype != torch.uint8:
            raise ValueError(f"{name} is no generator")
    if _TORCH not in names:
        raise ValueError("torch's generator is missing")


def restore_random(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Put every generator where it was; a GPU that is not here any more is left out."""
    random.setstate(_python_state(values))
    np.random.set_state(_numpy_state(values))
    torch.set_rng_state(tensors[_TORCH])
    for key, state in tensors.items():
        device = key.removeprefix(_CUDA)
        if device != key and int(device) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(device))


def _python_state(values: dict[str, Any]) -> tuple[Any, ...]:
    version, numbers, gauss = values["python"]
    return version, tuple(numbers), gauss


def _numpy_state(values: dict[str, Any]) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = values["numpy"]
    return name, np.array(keys, np.uint32), position, has_gauss, cached
