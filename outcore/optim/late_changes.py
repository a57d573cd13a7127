"""What a user may have done to parameters since the optimizer was made, and would not show.

Spans, gradients and state are laid out for what was trainable when the model was offloaded, and
the gradients of a block never pass its parameters' own autograd nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from outcore.errors import OutcoreError
from outcore.stream.unit import Unit


def check_trainable(units: Sequence[Unit]) -> None:
    """Refuse what was frozen or unfrozen between the offload and the optimizer."""
    for unit in units:
        for field in unit.layout.fields:
            if field.trainable != unit.parameters[field.name].requires_grad:
                raise ValueError(
                    f"{unit.full_name(field.name)} was "
                    f"{'trainable' if field.trainable else 'frozen'} when the model was "
                    "offloaded: set requires_grad before outcore.offload"
                )


class LateChanges:
    """Looks at each parameter once a step, without waiting for anything.

    Freezing is not refused: a parameter that is frozen rests (see gradients.py).
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._in_blocks: list[tuple[str, nn.Parameter]] = []
        self._on_edges: list[tuple[str, nn.Parameter]] = []
        for unit in units:
            trainable = {field.name for field in unit.layout.fields if field.trainable}
            for name, parameter in unit.parameters.items():
                if name not in trainable:
                    self._frozen.append((unit.full_name(name), parameter))
                else:
                    which = self._in_blocks if unit.arrives_whole else self._on_edges
                    which.append((unit.full_name(name), parameter))

    def refuse(self) -> None:
        """Raise OutcoreError for what would be ignored."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise OutcoreError(
                    f"{name} was frozen when the model was offloaded, and has no place for a "
                    "gradient and optimizer state: requires_grad=True comes too late. Set it back "
                    "to False, or call outcore.release(model), unfreeze, and offload anew."
                )
        for name, parameter in self._in_blocks:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise OutcoreError(
                    f"{name} has a hook on its gradient, which would never run: the gradients of "
                    "streamed blocks go straight to the optimizer. Remove it (handle.remove()). "
                    "Clip with AdamW(max_grad_norm=...), scale with the loss or the lr of a param "
                    "group, and look at gradients with hooks on modules "
                    "(register_full_backward_hook); register_hook on the embedding and the head "
                    "does run."
                )
            if parameter.grad is not None:
                raise OutcoreError(
                    f"{name} was also used outside of its block, and its gradient from there would "
                    "be lost: those of streamed blocks go from the block straight to the "
                    "optimizer. Leave out the term of the loss that is made of it, or compute it "
                    "in the block's forward and return it."
                )
        for name, parameter in self._on_edges:
            if parameter._post_accumulate_grad_hooks:
                raise OutcoreError(
                    f"{name} has a hook on its .grad, which would never run: its gradient goes "
                    "straight to the optimizer. Remove it (handle.remove()), and use "
                    "register_hook, which does run."
                )
