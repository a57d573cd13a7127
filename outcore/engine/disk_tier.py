"""The disk tier of one engine: a scratch directory, its books, and the files made in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outcore.machine.probe import found_gpu_direct_storage
from outcore.store.disk_budget import DiskBudget, disk_ledger
from outcore.store.ledger import Ledger
from outcore.store.scratch_directory import ScratchDirectory
from outcore.stream.disk_tensors import DiskShape, DiskTensors


class DiskTier:
    """Opens scratch files under one budget and deletes them all on ``close``."""

    def __init__(self, budget: DiskBudget, *, host_ledger: Ledger, device: torch.device) -> None:
        self.ledger = disk_ledger(budget)
        self._directory = ScratchDirectory(budget.path)
        self._host_ledger = host_ledger
        self._pin = device.type == "cuda"
        self._to_device = found_gpu_direct_storage(device, budget.path)
        self._files: list[DiskTensors] = []

    def make(
        self, name: str, shapes: Sequence[DiskShape], num_buffers: int, buffer_bytes: int
    ) -> DiskTensors:
        """Make a scratch file with tensors of ``shapes``; see DiskTensors."""
        self._files = [file for file in self._files if not file.is_closed]
        made = DiskTensors(
            self._directory.path,
            name,
            shapes,
            num_buffers=num_buffers,
            buffer_bytes=buffer_bytes,
            disk_ledger=self.ledger,
            host_ledger=self._host_ledger,
            pin=self._pin,
            to_device=self._to_device,
        )
        self._files.append(made)
        return made

    def check_uncut(self) -> None:
        """Raise StoreError if a file was cut: its mapped view cannot be looked at."""
        for file in self._files:
            file.check_uncut()

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._directory.close()
