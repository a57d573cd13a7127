from collections.abc import Iterator
from pathlib import Path

import pytest

from outcore.store.scratch_directory import ScratchDirectory


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    """A directory on tmpfs, which older kernels open without O_DIRECT only."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    with ScratchDirectory(shm) as directory:
        yield directory.path
