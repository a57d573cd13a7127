"""Where a run was before the step that it takes: what a refused step leaves to be saved."""

from __future__ import annotations

from typing import Any

from outcore.data.batches import Batches
from outcore.engine.offload import engine_of
from outcore.optim.adamw import AdamW
from outcore.random_state import RandomState


class BeforeStep:
    """Generators and position in the data; weights and their state are where they were, or not."""

    def __init__(self, model: Any, optimizer: AdamW, batches: Batches) -> None:
        self._optimizer = optimizer
        self._batches = batches
        self._num_updates = optimizer.num_steps
        self._random = RandomState(engine_of(model).device)
        self._position = batches.state_dict()

    def restore(self) -> bool:
        """Go back; False where that cannot be: updates during the backward have begun."""
        if self._optimizer.num_steps != self._num_updates:
            return False
        self._random.restore()
        self._batches.load_state_dict(self._position)
        return True
