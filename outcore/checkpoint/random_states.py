"""The states of all random generators that a run may draw from, as tensors and plain values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_tensors() -> list[tuple[str, Tensor]]:
    """Return torch's generators, the host's and each GPU's."""
    tensors = [("torch", torch.get_rng_state())]
    if torch.cuda.is_initialized():
        tensors += [(f"cuda.{i}", state) for i, state in enumerate(torch.cuda.get_rng_state_all())]
    return tensors


def random_values() -> dict[str, Any]:
    """Return the generators of Python and numpy, as JSON has them."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def restore_random(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Put every generator where it was; a GPU that is not here any more is left out."""
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for key, state in tensors.items():
        device = key.removeprefix("cuda.")
        if device != key and int(device) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(device))
