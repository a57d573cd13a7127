"""Outputs that transformers records inside blocks (router logits, attention weights).

transformers collects them through hooks on inner modules. Inside a block function those tensors
have no graph, and a recompute would record them twice. So a block's recordings become outputs of
the block function, and are handed to the model's own collector afterwards, with their gradients.
"""

from __future__ import annotations

from typing import Any

from transformers.utils.output_capturing import _active_collector

Recording = dict[str, list[Any]]


def call_recording(function: Any, *args: Any, keys: tuple[str, ...]) -> tuple[Any, Recording]:
    """Run ``function`` with a collector of its own; return its output and the recordings."""
    recording: Recording = {key: [] for key in keys}
    token = _active_collector.set(recording)
    try:
        output = function(*args)
    finally:
        _active_collector.reset(token)
    return output, recording


def keys() -> tuple[str, ...]:
    """Return what blocks record; hidden states are recorded around them, not inside."""
    collector = _active_collector.get() or ()
    return tuple(k for k in collector if k != "hidden_states" and not k.startswith("_"))


def hand_over(recording: Recording) -> None:
    collector = _active_collector.get()
    for key, values in recording.items():
        collector[key].extend(values)
