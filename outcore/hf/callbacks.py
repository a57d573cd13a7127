"""Callbacks that read the model get weights that are up to date.

Updates run behind the next forward, and not every callback can be told to wait for them: TRL's BEMA
averages parameters at the end of each step. transformers' own read none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from outcore.engine.offload import is_offloaded, synchronize

_READS = {"model", "parameters", "named_parameters", "state_dict"}


def wait_before_readers(handler: Any) -> None:
    """Make a trainer's callback handler wait for updates where a callback names the model."""
    call_event = handler.call_event

    def call(event: str, *args: Any, **kwargs: Any) -> Any:
        methods = (getattr(callback, event, None) for callback in handler.callbacks)
        if any(map(_reads_model, methods)) and is_offloaded(handler.model):
            synchronize(handler.model)
        return call_event(event, *args, **kwargs)

    handler.call_event = call


def _reads_model(method: Callable[..., Any] | None) -> bool:
    """Whether a callback's method names the model, or what models are read by."""
    if method is None or str(getattr(method, "__module__", "")).startswith("transformers."):
        return False
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return True  # nobody knows
    return not _READS.isdisjoint((*code.co_varnames, *code.co_names, *code.co_consts))
