"""Outcore: train and run Hugging Face models that do not fit in GPU memory."""

from outcore.engine.create import from_config, load
from outcore.engine.offload import engine_of, offload, synchronize
from outcore.errors import (
    LaneError,
    NonFiniteGradient,
    OutcoreError,
    OutOfBudget,
    StoreError,
    UnsupportedModel,
)
from outcore.optim.adamw import AdamW

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "LaneError",
    "NonFiniteGradient",
    "OutOfBudget",
    "OutcoreError",
    "StoreError",
    "UnsupportedModel",
    "engine_of",
    "from_config",
    "load",
    "offload",
    "synchronize",
]
