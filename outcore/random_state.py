"""The random and autocast state that a recompute must see as the first pass did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class RandomState:
    """The generators' states at one moment, on the host and on the compute device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: Tensor = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were found."""
    before = RandomState(device)
    try:
        yield
    finally:
        before.restore()


class AutocastState:
    """Whether autocast was on, and in which type."""

    def __init__(self, device: torch.device) -> None:
        self._type = device.type
        self._enabled = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type) if self._enabled else None

    def context(self) -> contextlib.AbstractContextManager[None]:
        if not self._enabled and not torch.is_autocast_enabled(self._type):
            return contextlib.nullcontext()
        return torch.autocast(self._type, dtype=self._dtype, enabled=self._enabled)
