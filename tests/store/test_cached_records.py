"""Records looked at through a map: what the page cache shows is compared with what was written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_faults import PAGE_BYTES, pattern

from outcore.errors import StoreError
from outcore.store import disk_calls
from outcore.store.ledger import Ledger
from outcore.store.scratch_file import ScratchFile, ScratchOptions

SIZES = [3 * PAGE_BYTES, (1 << 20) + PAGE_BYTES, PAGE_BYTES]


def make(folder: Path, *, direct: bool = True) -> ScratchFile:
    options = ScratchOptions(direct=direct)
    file = ScratchFile(folder, "w", SIZES, ledger=Ledger("disk", None), options=options)
    for index, size in enumerate(SIZES):
        file.write(index, memoryview(pattern(size, index)))
    return file


@pytest.mark.parametrize("direct", [True, False])
def test_every_page_is_compared(tmp_path: Path, direct: bool) -> None:
    with make(tmp_path, direct=direct) as file:
        view = torch.frombuffer(file.map(), dtype=torch.uint8)
        file.check(range(3))
        for page in range(file.layout.num_bytes // PAGE_BYTES):
            view[page * PAGE_BYTES + 17] += 1
            index = next(r.index for r in file.layout.records if page * PAGE_BYTES < r.end)
            with pytest.raises(StoreError, match=f"record {index} at .* not those written"):
                file.check([0, 1, 2])
            file.check([i for i in range(3) if i != index])
            view[page * PAGE_BYTES + 17] -= 1
        file.check([0, 1, 2])


@pytest.mark.parametrize("call", ["open_cached", "status", "read_at"])
def test_a_call_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "injected")

    num_open = len(os.listdir("/proc/self/fd"))
    with make(tmp_path) as file:
        with monkeypatch.context() as patch:
            patch.setattr(disk_calls, call, fail)
            with pytest.raises(StoreError, match=r"w\.scratch: cannot .* The drive failed"):
                file.check([1])
        file.check([1])
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_that_is_gone_cut_or_another(tmp_path: Path) -> None:
    with make(tmp_path) as file:
        file.path.rename(tmp_path / "moved")
        with pytest.raises(StoreError, match="No such file"):
            file.check([0])
        file.path.write_bytes(bytes(file.layout.num_bytes))
        with pytest.raises(StoreError, match="another file was put in its place"):
            file.check([0])
        (tmp_path / "moved").rename(file.path)
        file.check_uncut()
        os.truncate(file.path, file.layout.num_bytes - 1)
        file.check([0, 1])
        for check in (file.check_uncut, lambda: file.check([2])):
            with pytest.raises(StoreError, match="cut to"):
                check()
        file.path.unlink()
        with pytest.raises(StoreError, match="deleted"):
            file.check([0])


def test_what_was_never_written_or_lost_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as file:
        with monkeypatch.context() as patch:
            patch.setattr(disk_calls, "write_parts", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                file.write(0, memoryview(pattern(SIZES[0], 9)))
        with pytest.raises(StoreError, match="its last write failed"):
            file.check([0])
