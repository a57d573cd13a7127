"""Parameters of an offloaded model, whose ``.data`` counts what is written through it.

``parameter.data.copy_(ema)`` writes to memory and tells nobody: torch's ``.data`` has a count of
writes of its own. Copies of the parameter elsewhere, in slots and masters, would not follow, and
the next update would undo it. ``detach()`` gives the same values and the parameter's own count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_DATA: Any = vars(torch._C.TensorBase)["data"]


class HomeParameter(nn.Parameter):
    """An ``nn.Parameter`` in all but ``.data``."""

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)

    # Copies are ordinary: what makes this one the model's does not go with them.
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def count_writes_to_data(parameter: nn.Parameter) -> Callable[[], None]:
    """Make it a ``HomeParameter``; the object stays. Returns what undoes it.

    What has a class of its own keeps it.
    """
    if type(parameter) is not nn.Parameter:
        return lambda: None
    parameter.__class__ = HomeParameter

    def undo() -> None:
        parameter.__class__ = nn.Parameter

    return undo
