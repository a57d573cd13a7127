"""What one block call saves of its inputs: on the device through autograd, or on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outcore.passes.host_inputs import HostInputs, WaitingInput


class SavedInputs:
    """The tensor inputs of one call, of which the hidden states may wait on the host."""

    def __init__(self, store: HostInputs | None, tensors: Sequence[Tensor]) -> None:
        """``store``: where hidden states wait; None: all stays on the device."""
        self._store = store
        self._waiting: WaitingInput | None = None
        self._position = None if store is None else hidden_position(tensors)
        self._counter: Tensor | None = None  # no memory, only the count of writes to the input
        self._version = 0
        if self._position is not None:
            self._counter = tensors[self._position].detach()
            self._version = self._counter._version
            self._counter.data = self._counter.new_empty(0)

    def on_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what autograd is to save."""
        return [t for i, t in enumerate(tensors) if i != self._position]

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """After the block has run: let the hidden states go."""
        if self._store is None or self._position is None:
            return
        hidden = tensors[self._position]
        if hidden._version != self._version:
            raise RuntimeError(
                "a block changed its input in place; it cannot be recomputed from it. Use "
                'activations="keep".'
            )
        self._waiting = self._store.put(hidden)

    def all(self, on_device: Sequence[Tensor]) -> list[Tensor]:
        """In the backward: return every input on the device."""
        tensors = list(on_device)
        if self._store is None or self._position is None:
            return tensors
        if self._waiting is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: pass retain_graph=True to the "
                "first backward()"
            )
        assert self._counter is not None
        if self._counter._version != self._version:  # as autograd does for what it saves itself
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: the input of a block, after the block has run"
            )
        tensors.insert(self._position, self._store.get(self._waiting))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._waiting = None  # as autograd does: the graph itself may live on with the loss
        return tensors


def hidden_position(tensors: Sequence[Tensor]) -> int | None:
    """Return which input is the hidden states: the first with (batch, length, features)."""
    for i, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.dim() == 3:
            return i
    return None
