"""The device that a name stands for, or what is wrong with the name: for every command."""

from __future__ import annotations

import torch


def named_device(name: str | None) -> torch.device:
    """Return the device, None for the GPU if there is one; ValueError if it is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ValueError(f"device is neither cuda nor cpu: {name!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(
            f"device is {name}, but torch sees no GPU here; --device cpu runs the same engine"
        )
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device is {name}, but torch sees {count} here, counted from cuda:0")
    return device
