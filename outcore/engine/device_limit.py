"""How much of a GPU this process may take: the budget of the newest model, as long as it is there.

The allocator itself refuses more: a budget that is only planned is not a budget. The limit is the
process's, so it goes with the model: the one before has its own again, and after the last of them
the process has all of the GPU.
"""

from __future__ import annotations

import contextlib

import torch


class DeviceLimit:
    """The limit of one model, from its making to ``lift``."""

    def __init__(self, device: torch.device, part: float) -> None:
        """``part``: of all the device's memory."""
        self.part = min(1.0, part)
        self._device = device
        torch.cuda.set_per_process_memory_fraction(self.part, device)
        index = torch.cuda.current_device() if device.index is None else device.index
        _limits.setdefault(index, []).append(self)

    def lift(self) -> None:
        for limits in _limits.values():
            if self not in limits:
                continue
            limits.remove(self)
            part = limits[-1].part if limits else 1.0
            with contextlib.suppress(RuntimeError):  # a forked process has no GPU
                torch.cuda.set_per_process_memory_fraction(part, self._device)


_limits: dict[int, list[DeviceLimit]] = {}  # by the device's index, the newest last
