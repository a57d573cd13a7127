"""Gradients of edges: taken from autograd just before it would add them to ``.grad``.

A hook after that addition would have to clear ``.grad`` while another thread's backward may be
adding to it: on the CPU device, where each thread runs its own backward, gradients would be lost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from outcore.engine.offloaded import Engine
from outcore.left_to_python import left_to_python
from outcore.store.spans import Field
from outcore.stream.unit import Unit


def send_home(engine: Engine, unit: Unit, field: Field) -> Callable[[], None]:
    """Have the gradient of one parameter of an edge sent to its home; return what undoes it.

    Without an optimizer it stays in ``.grad``, and hooks of ``register_hook`` run before.
    """
    parameter = unit.parameters[field.name]
    node = get_gradient_edge(parameter).node
    # Weak: the collector cannot see through a hook that autograd holds.
    hook = functools.partial(
        _take, weakref.ref(engine), weakref.ref(unit), field, weakref.ref(parameter)
    )
    handle = node.register_prehook(hook)

    def undo(node: object = node) -> None:  # the parameter itself does not keep its node alive
        handle.remove()

    return undo


@left_to_python
def _take(
    engine_ref: weakref.ref[Engine],
    unit_ref: weakref.ref[Unit],
    field: Field,
    parameter_ref: weakref.ref[nn.Parameter],
    gradients: tuple[Tensor | None, ...],
) -> tuple[None] | None:
    """Return the nothing that autograd is to add, or None to have it add what it has."""
    engine, unit, parameter = engine_ref(), unit_ref(), parameter_ref()
    if engine is None or unit is None or parameter is None or engine.backend.gradients is None:
        return None
    (gradient,) = gradients
    if gradient is None:
        return None
    with engine.block_lock:
        if parameter.grad is not None:  # from before there was an optimizer
            gradient, parameter.grad = gradient + parameter.grad, None
        engine.backend.gradients.edge(unit, field, gradient)
    return (None,)
