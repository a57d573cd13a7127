"""Where the packed matrices of the block that runs are expanded: one block's worth, reused.

Expanding is work of the compute stream, like the block's own: what is launched later sees it, and
the next block's expansion comes after everything that reads this one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outcore.store.ledger import Ledger
from outcore.stream.unit import Unit
from outcore.units import format_bytes

PURPOSE = "expanded weights"


class Expansion:
    """A span of device memory for the largest block's matrices in the type that computes."""

    def __init__(
        self, units: Sequence[Unit], *, device: torch.device, dtype: torch.dtype, ledger: Ledger
    ) -> None:
        numel = max((u.packed.expanded.numel for u in units if u.packed is not None), default=0)
        num_bytes = numel * dtype.itemsize
        ledger.take(
            PURPOSE,
            num_bytes,
            remedy=(
                "frozen_weights expands one block at a time, at most "
                f"{format_bytes(num_bytes)} on the device: use a larger device_memory."
            ),
        )
        # It stays where it is: what autograd saves of it is found again after the next expansion.
        self.memory = torch.empty(numel, dtype=dtype, device=device)

    def expand(self, unit: Unit, flat: Tensor) -> dict[str, Tensor]:
        """Expand the packed matrices of the unit whose span is ``flat``; return them by name."""
        if unit.packed is None:
            return {}
        expanded = self.memory[: unit.packed.expanded.numel]
        with torch.no_grad():
            unit.packed.expand_(unit.packed_span(flat), expanded)
        return unit.packed.expanded.over(expanded)
