"""An Accelerator that leaves models and optimizers where they are.

Of accelerate a trainer then uses what a single device needs: data loaders, gathering, logging.
Moving a model, or its optimizer's state, to the device is what offloading is there to avoid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from outcore.errors import OutcoreError


def leave_in_place(accelerator: Any, prepare: Callable[[nn.Module], nn.Module]) -> None:
    """Make ``accelerator`` hand models to ``prepare``, and wrap optimizers without moving state."""
    wrap_optimizer = accelerator.prepare_optimizer

    def prepare_model(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        model = prepare(model)
        if not any(known is model for known in accelerator._models):
            accelerator._models.append(model)
        return model

    def prepare_optimizer(optimizer: Any, *_: Any, **__: Any) -> Any:
        return wrap_optimizer(optimizer, device_placement=False)

    def clip_grad_norm_(*_: Any, **__: Any) -> None:
        raise OutcoreError(
            "accelerator.clip_grad_norm_ would clip nothing: gradients leave the device during the "
            "backward. max_grad_norm in the arguments clips in the optimizer's step"
        )

    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.prepare_model = prepare_model
    accelerator.prepare_optimizer = prepare_optimizer
