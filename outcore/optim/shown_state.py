"""``optimizer.state`` as users of torch's optimizers expect it, and what they write there.

Its tensors are views of the homes. State that lodges on the device has been read from its home
before, and records on disk have checksums: both must be told of a write, to reset moments for
example. torch counts writes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outcore.errors import OutcoreError
from outcore.optim.backend import OptimizerBackend
from outcore.store.spans import separate
from outcore.stream.unit import Unit


def show_state(
    backend: OptimizerBackend,
    param_groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],
) -> None:
    """Fill ``state`` with views for the parameters of all groups.

    Each has a storage of its own: torch.save writes whole storages, and refuses one that holds
    several types.
    """
    in_groups = {id(p) for group in param_groups for p in group["params"]}
    for unit in backend.units:
        homes = backend.states[unit.index]
        for field in unit.layout.trainable:
            parameter = unit.parameters[field.name]
            if id(parameter) not in in_groups:
                continue
            entry: dict[str, Any] = {"step": torch.tensor(0.0)}
            for kind, tensor in homes.named():
                cut = tensor[field.offset // kind.per : -(-field.end // kind.per)]
                shape = field.shape if kind.per == 1 else cut.shape
                entry[kind.name] = separate(cut, shape)
            state[parameter] = entry


class StateWrites:
    """Looks at the state of each parameter once a step, without waiting for anything."""

    def __init__(self, backend: OptimizerBackend, state: Mapping[Tensor, dict[str, Any]]) -> None:
        self._backend = backend
        self._views: list[tuple[Unit, Tensor, dict[str, Tensor]]] = []
        for unit in backend.units:
            for field in unit.layout.trainable:
                parameter = unit.parameters[field.name]
                if parameter in state:
                    views = {k: v for k, v in state[parameter].items() if k != "step"}
                    self._views.append((unit, parameter, views))
        self.seen()

    def seen(self) -> None:
        """Say that whoever wrote until now has told it already."""
        self._versions = [[v._version for v in views.values()] for _, _, views in self._views]

    def follow(self, state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """Before a step or a checkpoint: take over what was written since the last one."""
        taken_out = [
            (unit, name)
            for unit, parameter, views in self._views
            for name, view in views.items()
            if not _fits(state.get(parameter, {}).get(name), view)
        ]
        if taken_out:
            for _, parameter, views in self._views:  # for the remedy
                state.setdefault(parameter, {}).update(views)
            unit, name = taken_out[0]
            raise OutcoreError(
                f"{name} of {unit.name} was taken out of optimizer.state, and would be used all "
                'the same (it is there again): to begin anew, load {"state": {}, "param_groups": '
                'optimizer.state_dict()["param_groups"]}'
            )
        for _, parameter, views in self._views:
            self._take_over(state[parameter], views)
        self.follow_in_place()

    def follow_in_place(self) -> None:
        """Take over what was written to the views themselves since the last step."""
        written = {
            unit.index: unit
            for (unit, _, views), before in zip(self._views, self._versions, strict=True)
            if before != [view._version for view in views.values()]
        }
        if written:
            self._backend.synchronize()
            self._backend.state_replaced(list(written.values()), with_remainder=False)
            self.seen()

    def _take_over(self, entry: dict[str, Any], views: dict[str, Tensor]) -> None:
        """Write tensors that a user has put in the place of views into these, which stay."""
        for name, view in views.items():
            given = entry[name]
            if given is not view:
                self._backend.synchronize()  # what lodges on the device comes home first
                view.copy_(given)
                entry[name] = view


def _fits(given: Any, view: Tensor) -> bool:
    return given is view or (isinstance(given, Tensor) and given.shape == view.shape)
