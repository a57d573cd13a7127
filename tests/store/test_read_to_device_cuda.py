"""The real cuFile reads records into a GPU's memory; its way through the host is allowed here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from disk_faults import PAGE_BYTES, pattern

from outcore.errors import StoreError
from outcore.kernels.checksum_torch import checksum_on_device
from outcore.store import cufile_calls
from outcore.store.ledger import Ledger
from outcore.store.scratch_file import ScratchFile, ScratchOptions

pytestmark = pytest.mark.gpu
NUM_BYTES = 9 * (1 << 20) + 512


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScratchFile:
    settings = tmp_path / "cufile.json"
    settings.write_text(json.dumps({"properties": {"allow_compat_mode": True}}))
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(settings))  # read at the first call
    _skip_where_cufile_takes_no_file(tmp_path / "plain")
    return ScratchFile(
        tmp_path,
        "w",
        [PAGE_BYTES, NUM_BYTES],
        ledger=Ledger("disk", None),
        options=ScratchOptions(to_device=True),
    )


def _skip_where_cufile_takes_no_file(path: Path) -> None:
    """On a machine without udev, say, it knows of no disk, and its way through the host is shut."""
    path.write_bytes(bytes(PAGE_BYTES))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        cufile_calls.deregister(cufile_calls.register(fd))
    except RuntimeError as error:
        pytest.skip(f"cuFile registers no file here: {error}")
    finally:
        os.close(fd)


def test_the_bytes_and_the_checksum_of_the_host(file: ScratchFile) -> None:
    assert file.reads_to_device
    memory = pattern(file.layout.records[1].num_bytes, seed=1)
    file.write(1, memoryview(memory))
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    arrived = file.read_to_device(1, target)
    assert arrived.rest is not None
    there = target[: arrived.num_bytes]
    file.verify(arrived, checksum_on_device(there, seed=arrived.seed))
    expected = torch.from_numpy(memory)
    assert torch.equal(there.cpu(), expected[: arrived.num_bytes])
    assert torch.equal(arrived.rest, expected[arrived.num_bytes : NUM_BYTES])
    target[12345] ^= 1
    with pytest.raises(StoreError, match="not those written"):
        file.verify(arrived, checksum_on_device(there, seed=arrived.seed))
    file.close()


def test_a_file_that_was_cut(file: ScratchFile) -> None:
    file.write(1, memoryview(pattern(file.layout.records[1].num_bytes, seed=1)))
    with open(file.path, "r+b") as other:
        other.truncate(1 << 20)
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    with pytest.raises(StoreError, match="was cut"):
        file.read_to_device(1, target)
    file.close()
