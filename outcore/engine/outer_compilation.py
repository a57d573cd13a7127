"""Users' own ``torch.compile`` of an offloaded model, which passes it by.

Blocks and loss are compiled by the engine, which must run between them as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from outcore.left_to_python import WHY, left_to_python


def uncompiled_methods(
    model: nn.Module, blocks: Collection[nn.Module]
) -> list[tuple[nn.Module, str, Any]]:
    """Return what replaces methods of the blocks, and of all modules around them."""
    streamed = {id(block) for block in blocks}
    replacements: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        if any(id(part) in streamed for part in module.modules()):
            replacements += [
                (module, "_call_impl", left_to_python(module._call_impl)),
                (module, "_compiled_call_impl", None),  # of a compile() before
                (module, "compile", _compile_nothing),
            ]
    return replacements


def _compile_nothing(*_: Any, **__: Any) -> None:
    warnings.warn(f"compile() changes nothing here: {WHY}", stacklevel=2)
