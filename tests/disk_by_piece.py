"""Disk I/O piece by piece through Python's calls, where a test can strike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outcore.kernels.disk_pieces import Moved, Part
from outcore.store import disk_calls


def leave_all_to_python(patch: pytest.MonkeyPatch) -> None:
    """Let the library move nothing, so that every piece goes through read_at and write_at."""

    def move_nothing(
        fd: int, parts: Sequence[Part], *, piece_bytes: int, threads: int
    ) -> list[Moved]:
        sizes = [part.memory.size for part in parts]
        return [Moved(checksum=0, left=list(range(0, size, piece_bytes))) for size in sizes]

    for name in ("read_parts", "write_parts"):
        patch.setattr(disk_calls, name, move_nothing)
