"""Adapters that are merged into their base, or taken out of it, while the model is offloaded.

PEFT writes the base's weights past the counter by which writes to parameters are noticed: copies in
slots, and records on disk, would stay as they were. Some methods, DoRA among them, even give the
weights other memory, which no home would ever see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outcore.engine.offloaded import Engine
from outcore.errors import OutcoreError
from outcore.stream.unit import Unit

METHODS = ("merge", "unmerge")


def merging_methods(model: nn.Module, engine: Engine) -> list[tuple[nn.Module, str, Any]]:
    """Return (layer, name, method) of what is to replace the methods of every adapter layer."""
    layers = [m for m in model.modules() if all(hasattr(m, name) for name in (*METHODS, "merged"))]
    return [
        (layer, name, functools.partial(_write_base, engine, layer, getattr(layer, name)))
        for layer in layers
        for name in METHODS
    ]


def _write_base(
    engine: Engine,
    layer: nn.Module,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if kwargs.get("safe_merge") or args[:1] == (True,):
        raise OutcoreError(
            "safe_merge=True would give the weights of an offloaded model other memory: leave it "
            "out, or call outcore.release(model) first"
        )
    if any(parameter.is_meta for parameter in layer.parameters()):
        raise OutcoreError(
            "adapters cannot be merged into weights that are kept in 8 or 4 bit: call "
            "outcore.release(model) first"
        )
    own = {id(parameter) for parameter in layer.parameters()}
    units = [u for u in engine.units if own & {id(p) for p in u.parameters.values()}]
    if not units:  # a block runs, on the weights of its slot
        raise OutcoreError(
            "merged adapters cannot be switched off in a forward: call unmerge_adapter() before"
        )
    engine.synchronize()
    try:
        return original(*args, **kwargs)
    finally:  # also where the second of two adapters failed: the first is in the weights
        for unit in units:
            _bring_home(unit, own)
        engine.weights_replaced(units, by_torch=True)


def _bring_home(unit: Unit, own: set[int]) -> None:
    """Copy values that were given other memory into the unit's home, and point there again."""
    homes = unit.layout.separate(unit.home)
    for name, home in homes.items():
        parameter = unit.parameters[name]
        if id(parameter) in own and parameter.data_ptr() != home.data_ptr():
            with torch.no_grad():
                home.copy_(parameter)
            parameter.data = home
