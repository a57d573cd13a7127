"""State on disk: GB/s each way of reading it and writing it back, in the chunks of the updates.

For each format, alone and beside a thread of Python code that never waits; between them the disk
itself, threads that read a request and write it back, without checksums, fences or staging. All in
one process and taking turns, so that a noisy disk is noisy for all.

    python benchmarks/disk_state.py --directory /mnt/nvme --gib 16 --json disk-state.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outcore.cli.machine import machine_facts
from outcore.optim.disk_updater import NUM_AHEAD, NUM_STAGED
from outcore.optim.state_format import state_format
from outcore.store.ledger import Ledger
from outcore.store.record_layout import page_aligned_bytes
from outcore.store.scratch_directory import ScratchDirectory
from outcore.stream.disk_tensors import DiskShape, DiskTensors, fetch_together, store_together
from outcore.stream.lanes import Fence

GIB = 1 << 30
REQUEST_BYTES = 8 << 20
NUM_THREADS = 4


class State:
    """Optimizer state of one format in a file, without parameters."""

    def __init__(self, directory: Path, format_name: str, num_bytes: int) -> None:
        format = state_format(format_name, torch.bfloat16)
        kinds, piece = format.tensors, format.max_piece_elements
        chunk_bytes = format.num_bytes(piece)
        self.num_chunks = max(NUM_STAGED, num_bytes // chunk_bytes)
        self.num_bytes = self.num_chunks * chunk_bytes
        self._file = DiskTensors(
            directory,
            format_name,
            [
                DiskShape(
                    numel=kind.numel(self.num_chunks * piece),
                    dtype=kind.dtype,
                    piece_numel=kind.numel(piece),
                )
                for kind in kinds
            ],
            num_buffers=NUM_STAGED,
            buffer_bytes=sum(page_aligned_bytes(kind.num_bytes(piece)) for kind in kinds),
            disk_ledger=Ledger("disk", None),
            host_ledger=Ledger("host", None),
            pin=False,
        )
        self.update()  # the first time nothing is read

    def update(self) -> None:
        """Read every chunk and write it back."""
        tensors, upcoming = self._file.tensors, iter(range(self.num_chunks))
        ahead: deque[tuple[int, list[Any]]] = deque()
        stores: list[Fence] = []
        for _ in range(self.num_chunks):
            while len(ahead) <= NUM_AHEAD and (chunk := next(upcoming, None)) is not None:
                ahead.append((chunk, fetch_together(tensors, chunk)))
            chunk, fetched = ahead.popleft()
            for _, here in fetched:
                here.block()
            values = [piece for piece, _ in fetched]
            stores.append(store_together(list(zip(tensors, values, strict=True)), chunk, []))
        for fence in stores:
            fence.block()

    def close(self) -> None:
        self._file.close()


class Raw:
    """The same bytes in one file, and nothing around it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        self._num_requests = num_bytes // REQUEST_BYTES
        self.num_bytes = self._num_requests * REQUEST_BYTES
        os.posix_fallocate(self._fd, 0, self.num_bytes)
        page = mmap.mmap(-1, REQUEST_BYTES)
        page.write(os.urandom(REQUEST_BYTES))
        for i in range(self._num_requests):
            os.pwritev(self._fd, [page], i * REQUEST_BYTES)

    def update(self) -> None:
        numbers, lock = iter(range(self._num_requests)), threading.Lock()

        def work() -> None:
            buffer = mmap.mmap(-1, REQUEST_BYTES)
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                os.preadv(self._fd, [buffer], number * REQUEST_BYTES)
                os.pwritev(self._fd, [buffer], number * REQUEST_BYTES)

        # Half of the threads read while the others write, as the lanes of state do.
        threads = [threading.Thread(target=work) for _ in range(2 * NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def busy_interpreter() -> Iterator[None]:
    """A thread of Python code that gives its lock up only when it must."""
    stop = False

    def spin() -> None:
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def measure(directory: Path, formats: list[str], num_bytes: int, repeats: int) -> dict[str, Any]:
    """GB/s each way, a list for each of what is measured."""
    speeds: dict[str, list[float]] = {}
    with ScratchDirectory(directory) as scratch:
        for name in formats:
            state = State(scratch.path, name, num_bytes)
            raw = Raw(scratch.path / "raw.scratch", num_bytes)
            passes = {
                "disk alone": (raw, contextlib.nullcontext),
                name: (state, contextlib.nullcontext),
                f"{name}, busy interpreter": (state, busy_interpreter),
            }
            for _ in range(repeats):
                for what, (moved, beside) in passes.items():
                    with beside():
                        start = time.perf_counter()
                        moved.update()
                        seconds = time.perf_counter() - start
                    speed = moved.num_bytes / seconds / 1e9
                    speeds.setdefault(what, []).append(speed)
                    print(f"{what:26s} {speed:5.2f} GB/s each way", flush=True)
            state.close()
            raw.close()
            (scratch.path / "raw.scratch").unlink()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--formats", default="fp32,minimal", help="with commas")
    parser.add_argument("--gib", type=float, default=4.0, help="of state, and as much again beside")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * GIB)
    speeds = measure(
        arguments.directory, arguments.formats.split(","), num_bytes, arguments.repeats
    )
    print()
    for what, runs in speeds.items():
        print(f"{what:26s} {statistics.median(runs):5.2f} GB/s each way, {min(runs):.2f} at least")
    if arguments.json:
        figures = {"machine": machine_facts(), "num_bytes": num_bytes, "gb_per_s": speeds}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
