"""Outcore: train and run Hugging Face models that do not fit in GPU memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore import hf
    from outcore.engine.create import from_config, load
    from outcore.engine.offload import engine_of, offload, release, synchronize
    from outcore.engine.run_record import record, report
    from outcore.errors import (
        DoesNotFit,
        LaneError,
        NonFiniteGradient,
        OutcoreError,
        OutOfBudget,
        StoreError,
        UnsupportedModel,
    )
    from outcore.optim.adamw import AdamW
    from outcore.planning.make import plan

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "DoesNotFit",
    "LaneError",
    "NonFiniteGradient",
    "OutOfBudget",
    "OutcoreError",
    "StoreError",
    "UnsupportedModel",
    "engine_of",
    "from_config",
    "hf",
    "load",
    "offload",
    "plan",
    "record",
    "release",
    "report",
    "synchronize",
]

# Where each name comes from. Loaded when first asked for: torch takes seconds to import, which
# `outcore --help` should not.
_HOMES = {
    "outcore.engine.create": ("from_config", "load"),
    "outcore.engine.offload": ("engine_of", "offload", "release", "synchronize"),
    "outcore.engine.run_record": ("record", "report"),
    "outcore.errors": (
        "DoesNotFit",
        "LaneError",
        "NonFiniteGradient",
        "OutOfBudget",
        "OutcoreError",
        "StoreError",
        "UnsupportedModel",
    ),
    "outcore.optim.adamw": ("AdamW",),
    "outcore.planning.make": ("plan",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "hf":  # a room of its own, which needs accelerate
        return import_module("outcore.hf")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
