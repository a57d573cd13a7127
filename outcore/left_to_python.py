"""Functions that torch's compiler lets be, where users compile what calls them.

Traced from outside, the engine's own work would be compiled with the model's: its locks and waits,
again for each block and each shape, to other bits perhaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

WHY = "outcore.offload(compile=True) compiles the blocks and the loss of an offloaded model"

Function = TypeVar("Function", bound=Callable[..., Any])


def left_to_python(function: Function) -> Function:
    """Return ``function`` as the compiler lets it be; what it calls may be compiled by itself."""
    return cast(Function, torch.compiler.disable(function, reason=WHY))
