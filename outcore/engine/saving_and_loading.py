"""Saving and loading an offloaded model, whole or in part: both wait for the updates in flight.

What is saved from a disk is compared with its checksums first: a saved model holds no harm.

Hooks on every module, because users, and libraries for them, save and load submodules too: the
inner model that holds the layers, the one below adapters, the layers themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from outcore.engine.offloaded import Engine
from outcore.errors import OutcoreError
from outcore.stream.unit import Unit


def hook_saving_and_loading(model: nn.Module, engine: Engine) -> list[Callable[[], None]]:
    """Have ``state_dict`` and ``load_state_dict`` of every module wait; return what undoes it."""
    loads = _Loads(engine)
    undo = []

    def before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        engine.synchronize_if_updated()
        # Modules inside the one that is saved have a prefix; with keep_vars nobody wants values.
        if (module is model or not prefix) and not keep_vars:
            engine.check_weights_on_disk(_units_of(module, engine))

    for module in model.modules():
        hooks = (
            module.register_state_dict_pre_hook(before_saving),
            module.register_load_state_dict_pre_hook(loads.before),
            module.register_load_state_dict_post_hook(loads.after),
        )
        undo += [hook.remove for hook in hooks]
    return undo


class _Loads:
    """Tells the module that a load began with from those inside it, whose hooks run as well."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Which module began, and the list of missing keys: one object throughout a load, so that a
        # load that was broken off is not taken for the next one.
        self._running: tuple[nn.Module, list[str]] | None = None

    def before(
        self,
        module: nn.Module,
        state: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *_: Any,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise OutcoreError(
                "load_state_dict(assign=True) would replace the parameters of an offloaded model "
                "by others that have no home: leave assign out"
            )
        if self._running is None or self._running[1] is not missing_keys:
            self._running = module, missing_keys
            self._engine.synchronize()

    def after(self, module: nn.Module, incompatible: Any) -> None:
        if self._running is None or self._running[0] is not module:
            return
        self._running = None
        self._engine.weights_replaced(_units_of(module, self._engine), by_torch=True)


def _units_of(module: nn.Module, engine: Engine) -> list[Unit]:
    """Return the units that have parameters of the module."""
    own = {id(parameter) for parameter in module.parameters()}
    return [
        unit for unit in engine.units if not own.isdisjoint(id(p) for p in unit.parameters.values())
    ]


def saving_methods(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return (module, name, method) of what is to replace the methods that save to a directory."""
    name = "save_pretrained"
    savers = [module for module in model.modules() if hasattr(type(module), name)]
    return [(m, name, functools.partial(_save_pretrained, getattr(m, name))) for m in savers]


def _save_pretrained(original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Save as the model's class does, in shards small enough to need little extra memory."""
    kwargs.setdefault("max_shard_size", "2GB")
    return original(path, *args, **kwargs)
