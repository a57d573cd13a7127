"""What a resumed run was told otherwise than before."""

from __future__ import annotations

from typing import Any

_MAY_CHANGE = {"resume", "save_every", "keep", "log_every", "tensorboard", "num_workers", "output"}
_MAY_CHANGE |= {"device_memory", "host_memory", "disk", "device", "cache_dir", "eval_every"}
_MAY_CHANGE |= {"clip_in_two_passes"}


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs and may change the numbers, in words."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in now.items()}  # as in JSON
    return [
        f"{name} was {before[name]!r}, is {value!r}"
        for name, value in plain.items()
        if name in before and name not in _MAY_CHANGE and before[name] != value
    ]
