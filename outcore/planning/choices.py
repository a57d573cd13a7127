"""The choices that a search goes through: placements by a few counts, many at a time.

First blocks get device homes, because the forward needs their updates first and hides nothing
behind them; last blocks go to disk, and last blocks keep their activations, because their backward
comes at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.planning.placement import Placement
from outcore.planning.plan import Activations, BlockPlan, Tier

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
Counts = NDArray[np.int64]
_PLANS: dict[tuple[Tier, Tier, Activations], BlockPlan] = {}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement by counts. ``first_``: of the first blocks, ``last_``: of the last ones."""

    first_device_weights: int = 0
    first_device_state: int = 0
    last_disk_weights: int = 0
    last_disk_state: int = 0
    last_kept: int = 0
    offloads_inputs: int = 0  # of the blocks that do not keep: 1 if their inputs wait on the host
    edge_state: int = 1  # index into TIERS
    num_slots: int = 3
    num_visits: int = 0

    def placement(self, num_blocks: int, micro_batch: int) -> Placement:
        return Placement(
            blocks=tuple(self._block(i, num_blocks) for i in range(num_blocks)),
            edge_state=TIERS[self.edge_state],
            micro_batch=micro_batch,
            num_slots=self.num_slots,
            num_visits=self.num_visits,
        )

    def _block(self, i: int, n: int) -> BlockPlan:
        weights = _tier(i, self.first_device_weights, n - self.last_disk_weights)
        state = _tier(i, self.first_device_state, n - self.last_disk_state)
        activations: Activations = "offload" if self.offloads_inputs else "recompute"
        if i >= n - self.last_kept:
            activations = "keep"
        key = weights, state, activations
        if key not in _PLANS:
            _PLANS[key] = BlockPlan(weights=weights, state=state, activations=activations)
        return _PLANS[key]


def _tier(block: int, first_not_on_device: int, first_on_disk: int) -> Tier:
    if block < first_not_on_device:
        return "device"
    return "disk" if block >= first_on_disk else "host"


NAMES = tuple(field.name for field in fields(Choice))


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Many choices: one array for each field of ``Choice``, all of one length."""

    first_device_weights: Counts
    first_device_state: Counts
    last_disk_weights: Counts
    last_disk_state: Counts
    last_kept: Counts
    offloads_inputs: Counts
    edge_state: Counts
    num_slots: Counts
    num_visits: Counts

    @classmethod
    def of(cls, choices: list[Choice]) -> Choices:
        columns = {n: np.array([getattr(c, n) for c in choices], dtype=np.int64) for n in NAMES}
        return cls(**columns)

    @classmethod
    def product(cls, **options: list[int]) -> Choices:
        """Return all combinations of the options; a field without options has its default."""
        lists = [options.get(name, [getattr(Choice(), name)]) for name in NAMES]
        grids = np.meshgrid(*[np.array(values, dtype=np.int64) for values in lists], indexing="ij")
        columns: dict[str, Any] = {
            name: grid.ravel() for name, grid in zip(NAMES, grids, strict=True)
        }
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.num_slots)

    def __getitem__(self, index: int) -> Choice:
        return Choice(**{name: int(getattr(self, name)[index]) for name in NAMES})

    def __iter__(self) -> Iterator[Choice]:
        return (self[i] for i in range(len(self)))

    def where(self, mask: NDArray[Any]) -> Choices:
        """Return those that a mask picks, or an index array orders."""
        return Choices(**{name: getattr(self, name)[mask] for name in NAMES})

    def but(self, **columns: Counts) -> Choices:
        return replace(self, **columns)

    @property
    def num_helping(self) -> Counts:
        return np.clip(self.num_visits - 1, 0, 2)

    def distinct(self) -> Choices:
        """Return each once, ordered by its fields; np.unique of rows takes ten times as long."""
        table = np.stack([getattr(self, name) for name in NAMES])
        table = table[:, np.lexsort(table[::-1])]
        is_new = np.ones(table.shape[1], dtype=np.bool_)
        is_new[1:] = (table[:, 1:] != table[:, :-1]).any(axis=0)
        return Choices(**dict(zip(NAMES, table[:, is_new], strict=True)))
