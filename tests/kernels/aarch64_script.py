"""Calls of the host kernels on an aarch64 CPU that this machine emulates.

Owns the cross build, by the commands of setup.py, and the scripts that aarch64_driver.cpp reads.
What is called, and what must come back, is the tests' business.
"""

from __future__ import annotations

import itertools
import runpy
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
DRIVER_SOURCE = Path(__file__).with_name("aarch64_driver.cpp")
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")

_ALIGNMENT_BYTES = 16  # of each buffer, in the driver
_GUARD = b"\xa5"


class Array(NamedTuple):
    """Where a script holds the copy of a tensor."""

    buffer: int  # counted from 1
    begin: int
    dtype: torch.dtype


class Answer(NamedTuple):
    """What all calls returned, and the buffers as they were after the last one."""

    results: list[int]
    buffers: list[bytes]

    def tensor(self, array: Array) -> Tensor:
        buffer = self.buffers[array.buffer - 1]
        end = len(buffer) - array.begin
        guard = _GUARD * array.begin
        assert (buffer[: array.begin], buffer[end:]) == (guard, guard), "written out of bounds"
        all_bytes = torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
        return all_bytes[array.begin : end].clone().view(array.dtype)


class Script:
    """Arrays, with their contents before the first call, and calls."""

    def __init__(self) -> None:
        self._buffers: list[bytes] = []
        self._calls: list[bytes] = []

    def array(self, tensor: Tensor) -> Array:
        """Copy `tensor`, between guards, and aligned to its elements but to nothing larger."""
        guard = _GUARD * (_ALIGNMENT_BYTES + tensor.element_size())
        self._buffers.append(guard + tensor.view(torch.uint8).numpy().tobytes() + guard)
        return Array(len(self._buffers), len(guard), tensor.dtype)

    def call(self, name: str, *arguments: int | Array) -> None:
        pairs = [a[:2] if isinstance(a, Array) else (0, a % 2**64) for a in arguments]
        words = itertools.chain.from_iterable(pairs)
        self._calls.append(_sized(name.encode()) + _words(len(pairs), *words))

    def run(self, machine: Aarch64) -> Answer:
        buffers = [_words(len(self._buffers)), *map(_sized, self._buffers)]
        output = machine.run(b"".join([*buffers, _words(len(self._calls)), *self._calls]))
        sizes = [8 * len(self._calls), *map(len, self._buffers)]
        assert len(output) == sum(sizes)
        ends = itertools.accumulate(sizes)
        results, *contents = [
            output[end - size : end] for end, size in zip(ends, sizes, strict=True)
        ]
        return Answer([status for (status,) in struct.iter_unpack("<q", results)], contents)


class Aarch64:
    """The library and the driver, built for aarch64, and what runs them here."""

    def __init__(self, folder: Path) -> None:
        emulator = next(filter(shutil.which, EMULATORS), None)
        if shutil.which(COMPILER) is None or emulator is None:
            pytest.skip(f"needs {COMPILER} and {EMULATORS[0]}")
        self.library = folder / "_outcore_kernels.so"
        for command in _library_commands(self.library):
            _run(command)
        driver = folder / "driver"
        # The library leaves OpenMP's symbols open, as setup.py says; here the driver brings them.
        flags = ["-O1", "-std=c++17", f"-I{ROOT / 'kernels'}", "-fopenmp", "-Wl,-rpath,$ORIGIN"]
        _run([COMPILER, *flags, str(DRIVER_SOURCE), str(self.library), "-o", str(driver)])
        libc = _run([COMPILER, "-print-file-name=libc.so.6"]).decode().strip()
        self._command = [emulator, "-L", str(Path(libc).resolve().parents[1]), str(driver)]

    def run(self, script: bytes) -> bytes:
        return _run(self._command, script)

    def disassembly(self) -> dict[str, str]:
        """The instructions of each function of the library."""
        objdump = _run([COMPILER, "-print-prog-name=objdump"]).decode().strip()
        listing = _run([objdump, "-d", "--no-show-raw-insn", str(self.library)]).decode()
        functions = (part.partition(">:\n") for part in listing.split("\n\n"))
        return {head.rpartition("<")[2]: code for head, _, code in functions}


def _library_commands(library: Path) -> list[list[str]]:
    """What setup.py would run on an aarch64 machine, but with the cross compiler."""
    pytest.importorskip("setuptools.command.bdist_wheel", reason="setup.py needs newer setuptools")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        setup = runpy.run_path(str(ROOT / "setup.py"))
    best_way: list[list[str]] = setup["build_commands"]([COMPILER], library)[0]
    return best_way


def _run(command: list[str], stdin: bytes = b"") -> bytes:
    result = subprocess.run(command, input=stdin, capture_output=True)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr.decode()}"
    return result.stdout


def _words(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words)


def _sized(data: bytes) -> bytes:
    return _words(len(data)) + data
