"""Which layers and parameters a block is made of, and whether it still is.

A streamed block runs with the weights that were placed, whatever its module has come to hold. A
parameter or a layer that was put there since, by torch.func.functional_call or by hand, would be
ignored without a word.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from outcore.errors import OutcoreError


class BlockStructure:
    """The layers and parameters of one block, as they were when it was made."""

    def __init__(self, block: nn.Module) -> None:
        self._parameters = [(m, dict(m._parameters)) for m in block.modules() if m._parameters]
        tables: list[dict[str, Any]] = [
            table for module in block.modules() for table in (module._modules, module._parameters)
        ]
        self._tables = [(table, dict(table)) for table in tables]

    def refuse_changes(self, name: str) -> None:
        """Raise OutcoreError if the block called ``name`` holds others now."""
        for table, before in self._tables:
            if not _is_same(table, before):
                raise OutcoreError(
                    f"the layers or parameters of {name} were replaced after outcore.offload (by "
                    "adapters, a parametrization or torch.func.functional_call perhaps), and the "
                    "new ones would be ignored: add adapters first and offload the model with "
                    "them, or call outcore.release(model) before"
                )

    def restore_parameters(self) -> None:
        """After a run: make parameters of what torch has registered as buffers.

        It does so where a forward puts a parametrization on a weight and takes it off again, as
        PEFT's does for ``target_parameters``: while the block runs, the weight is no Parameter.
        """
        for module, before in self._parameters:
            buffers = module._buffers
            if all(key in module._parameters for key in before):
                continue
            now = {**buffers, **module._parameters}
            if all(now.get(key) is parameter for key, parameter in before.items()):
                for key in before:
                    buffers.pop(key, None)
                module._parameters.clear()  # in the order that they had
                module._parameters.update(before)


def _is_same(table: dict[str, Any], before: dict[str, Any]) -> bool:
    if len(table) == len(before) and all(table.get(key) is before[key] for key in before):
        return True
    return all(  # but for layers without parameters: an activation, a dropout
        table.get(key) is before.get(key)
        or not (_has_parameters(table.get(key)) or _has_parameters(before.get(key)))
        for key in {**table, **before}
    )


def _has_parameters(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None
    return value is not None
