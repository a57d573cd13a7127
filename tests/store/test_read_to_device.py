"""Records read past the host: the same bytes, verified, and errors that say what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from cufile_on_host import CufileOnHost
from disk_faults import PAGE_BYTES, pattern
from torch import Tensor

from outcore.errors import StoreError
from outcore.kernels.checksum_torch import checksum_on_device
from outcore.store import cufile_calls
from outcore.store.ledger import Ledger
from outcore.store.scratch_file import ScratchFile, ScratchOptions

PIECES = ScratchOptions(piece_bytes=2 * PAGE_BYTES, num_threads=3, to_device=True)


def make(directory: Path, *sizes_bytes: int) -> ScratchFile:
    return ScratchFile(directory, "w", sizes_bytes, ledger=Ledger("disk", None), options=PIECES)


def written(file: ScratchFile, index: int, num_bytes: int) -> Tensor:
    """Write a record with something behind its ``num_bytes``; return these."""
    memory = pattern(file.layout.records[index].num_bytes, seed=index + num_bytes)
    file.write(index, memoryview(memory))
    return torch.from_numpy(memory)[:num_bytes].clone()


def read(file: ScratchFile, index: int, num_bytes: int) -> Tensor:
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    arrived = file.read_to_device(index, target)
    found = checksum_on_device(target[: arrived.num_bytes], seed=arrived.seed)
    file.verify(arrived, found)
    if arrived.rest is not None:
        target[arrived.num_bytes :] = arrived.rest
    return target


@pytest.mark.parametrize(
    "num_bytes", [2, PAGE_BYTES, PAGE_BYTES + 2, 5 * PAGE_BYTES - 512, 7 * PAGE_BYTES]
)
def test_the_bytes_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    cufile = CufileOnHost(monkeypatch)
    with make(tmp_path, 3 * PAGE_BYTES, num_bytes) as file:
        assert file.reads_to_device
        written(file, 0, 3 * PAGE_BYTES)
        for _ in range(2):  # another write, another seed
            values = written(file, 1, num_bytes)
            assert torch.equal(read(file, 1, num_bytes), values)
    assert cufile.num_reads > 0 or num_bytes < PAGE_BYTES
    assert cufile.registered == {}, "the file is still known to cuFile"


@pytest.mark.parametrize("at", [0, 3 * PAGE_BYTES + 17, 4 * PAGE_BYTES + 5])
def test_a_flipped_bit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    CufileOnHost(monkeypatch)
    num_bytes = 4 * PAGE_BYTES + 100  # the last of these bits is on the page that is shared
    with make(tmp_path, num_bytes) as file:
        written(file, 0, num_bytes)
        with open(file.path, "r+b") as other:
            other.seek(at)
            (byte,) = other.read(1)
            other.seek(at)
            other.write(bytes([byte ^ 4]))
        with pytest.raises(StoreError, match="the bytes read are not those written"):
            read(file, 0, num_bytes)


def test_a_short_read_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_but_some(_: bytearray, offset: int) -> int:
        return PAGE_BYTES + 7 if offset == 0 else 2 * PAGE_BYTES - offset % (2 * PAGE_BYTES)

    cufile = CufileOnHost(monkeypatch, all_but_some)
    with make(tmp_path, 4 * PAGE_BYTES) as file:
        values = written(file, 0, 4 * PAGE_BYTES)
        assert torch.equal(read(file, 0, 4 * PAGE_BYTES), values)
    assert cufile.num_reads == 3


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EIO, "cuFileRead failed"), r"w\.scratch: cannot read .*see dmesg"),
        (OSError(0, "cuFileRead failed with status 5030"), r"status 5030\. Name another disk"),
    ],
    ids=["the system's", "cuFile's own"],
)
def test_a_refused_read_names_the_place_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, told: str
) -> None:
    def refuse(_: bytearray, offset: int) -> int:
        raise error

    CufileOnHost(monkeypatch, refuse)
    with make(tmp_path, 4 * PAGE_BYTES) as file:
        written(file, 0, 4 * PAGE_BYTES)
        with pytest.raises(StoreError, match=told):
            read(file, 0, 4 * PAGE_BYTES)


def test_a_file_that_cufile_refuses_is_read_through_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> int:
        raise RuntimeError("cuFileHandleRegister failed: GPUDirect Storage not supported on file")

    monkeypatch.setattr(cufile_calls, "register", refuse)
    with pytest.warns(RuntimeWarning, match="not supported on file.*outcore probe --refresh"):
        file = make(tmp_path, PAGE_BYTES)
    assert not file.reads_to_device
    file.close()


def test_a_record_that_was_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CufileOnHost(monkeypatch)
    with make(tmp_path, PAGE_BYTES) as file, pytest.raises(ValueError, match="never written"):
        read(file, 0, PAGE_BYTES)
