"""Scratch on disk: GB/s of plain O_DIRECT, of a ScratchFile with its checksums, and their ratio.

With the time of the cores that each takes, which a busy machine disturbs less.

Both sides move the same records with the same threads and pieces, to and from the same memory, in
one process, and take turns, so that a noisy disk is noisy for both. Also the checksum by itself, on
one core: of a buffer that is in the cache, and of one that is not.

    python benchmarks/disk.py --directory /mnt/nvme --json disk.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from outcore.kernels.checksum import checksum_pages
from outcore.kernels.library import host_isa
from outcore.store.host_arena import HostArena
from outcore.store.ledger import Ledger
from outcore.store.scratch_directory import ScratchDirectory
from outcore.store.scratch_file import ScratchFile, ScratchOptions

MIB = 1 << 20


class RawFile:
    """The same file with nothing around it: preadv and pwritev of pieces on a pool of threads."""

    def __init__(self, path: Path, num_bytes: int, options: ScratchOptions, direct: bool) -> None:
        self._piece_bytes = options.piece_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        self._fd = os.open(path, flags)
        os.posix_fallocate(self._fd, 0, num_bytes)
        self._pool = ThreadPoolExecutor(options.num_threads)

    def move(
        self, call: Callable[[int, list[memoryview], int], int], memory: memoryview, offset: int
    ) -> None:
        def one(start: int) -> None:
            piece = memory[start : start + self._piece_bytes]
            assert call(self._fd, [piece], offset + start) == len(piece)

        for _ in self._pool.map(one, range(0, len(memory), self._piece_bytes)):
            pass

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_disk(
    directory: Path, num_records: int, record_bytes: int, options: ScratchOptions, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], bool]:
    """Seconds of each pass over all records, by the clock and of the cores.

    The first round, on fresh extents, is not counted.
    """
    num_bytes = num_records * record_bytes
    arena = HostArena(record_bytes, purpose="record", ledger=Ledger("host", None), pin=False)
    memory = arena.span(record_bytes, torch.uint8)
    memory.random_()
    view = memoryview(memory.numpy())
    seconds: dict[str, list[float]] = {}
    core_seconds: dict[str, list[float]] = {}
    sizes = [record_bytes] * num_records
    with (
        ScratchDirectory(directory) as scratch,
        ScratchFile(
            scratch.path, "ours", sizes, ledger=Ledger("disk", None), options=options
        ) as ours,
    ):
        raw = RawFile(scratch.path / "raw.scratch", num_bytes, options, ours.is_direct)
        indices = range(num_records)
        passes: dict[str, Callable[[], object]] = {
            "raw write": lambda: [raw.move(os.pwritev, view, i * record_bytes) for i in indices],
            "scratch write": lambda: [ours.write(i, memory) for i in indices],
            "raw read": lambda: [raw.move(os.preadv, view, i * record_bytes) for i in indices],
            "scratch read": lambda: [ours.read(i, memory) for i in indices],
        }
        for repeat in range(-1, repeats):
            for name, run in passes.items():
                core_start_s = time.process_time()
                second = timed(run)
                if repeat >= 0:
                    seconds.setdefault(name, []).append(second)
                    core_seconds.setdefault(name, []).append(time.process_time() - core_start_s)
        raw.close()
        return seconds, core_seconds, ours.is_direct


def measure_checksum(repeats: int) -> dict[str, float]:
    """GB/s on one core: 1 MiB over and over, and 256 MiB once through."""
    figures = {}
    for label, num_bytes, num_runs in (
        ("in cache", MIB, 200 * repeats),
        ("in memory", 256 * MIB, repeats),
    ):
        arena = HostArena(num_bytes, purpose="checksum", ledger=Ledger("host", None), pin=False)
        data = arena.span(num_bytes, torch.uint8).random_().numpy()
        assert isinstance(data, np.ndarray)
        best_s = min(timed(lambda data=data: checksum_pages(data)) for _ in range(num_runs))  # type: ignore[misc]
        figures[label] = num_bytes / best_s / 1e9
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Scratch on disk, GB/s.")
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--records", type=int, default=8)
    parser.add_argument("--record-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=ScratchOptions().num_threads)
    parser.add_argument("--piece-mib", type=int, default=ScratchOptions().piece_bytes // MIB)
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    arguments = parser.parse_args()

    options = ScratchOptions(num_threads=arguments.threads, piece_bytes=arguments.piece_mib * MIB)
    checksum = measure_checksum(arguments.repeats)
    record_bytes = arguments.record_mib * MIB
    seconds, core_seconds, is_direct = measure_disk(
        arguments.directory, arguments.records, record_bytes, options, arguments.repeats
    )
    num_bytes = arguments.records * record_bytes
    gb_per_s = {n: num_bytes / statistics.median(runs) / 1e9 for n, runs in seconds.items()}
    cores = {n: statistics.median(runs) / num_bytes * 1e9 for n, runs in core_seconds.items()}
    print(
        f"{arguments.directory}: {'O_DIRECT' if is_direct else 'page cache'}, "
        f"{arguments.records} records of {arguments.record_mib} MiB, {arguments.threads} threads, "
        f"pieces of {arguments.piece_mib} MiB, median of {arguments.repeats}"
    )
    for verb in ("write", "read"):
        raw, ours = gb_per_s[f"raw {verb}"], gb_per_s[f"scratch {verb}"]
        print(f"{verb:<6} raw {raw:6.2f} GB/s   scratch {ours:6.2f} GB/s   ratio {ours / raw:.3f}")
        raw, ours = cores[f"raw {verb}"], cores[f"scratch {verb}"]
        print(f"{'':<6} raw {raw:6.3f} core-s/GB  scratch {ours:.3f} core-s/GB")
    print(
        f"checksum ({host_isa()}, one core): {checksum['in cache']:.1f} GB/s in the cache, "
        f"{checksum['in memory']:.1f} GB/s from memory"
    )
    if arguments.json:
        figures = {
            "machine": platform.machine(),
            "num_cores": os.cpu_count(),
            "isa": host_isa(),
            "is_direct": is_direct,
            "num_records": arguments.records,
            "record_bytes": record_bytes,
            "num_threads": arguments.threads,
            "piece_bytes": options.piece_bytes,
            "gb_per_s": gb_per_s,
            "core_s_per_gb": cores,
            "checksum_gb_per_s": checksum,
            "load_average": os.getloadavg(),
            "seconds": seconds,
            "core_seconds": core_seconds,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
