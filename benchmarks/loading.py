"""Loading a checkpoint: GB/s of ``outcore.load`` beside those of the disk, and the memory it takes.

A checkpoint of random bf16 weights is written if there is none. The disk's own rate is that of the
same files, read past the page cache by a few threads into buffers that are used again; "to memory"
is the same with every piece copied to where it stays, in new memory: no loader does less. The three
take turns, with nothing of the files in the page cache. As much new memory is touched and given
back before each that needs it: a virtual machine may have to get it from its host first, at a rate
that has nothing to do with loading. That rate is reported too. The first load, which imports the
model's code, is not counted.

    python benchmarks/loading.py --json FILE [--shape qwen2.5-1.5b] [--directory DIR]
                                 [--device cuda --device-blocks 9]
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import outcore
from outcore.bench.outcore_run import use_of_lanes
from outcore.cli.machine import machine_facts
from outcore.shapes import shape_config
from outcore.stream.recording import recording

PIECE_BYTES = 8 << 20
NUM_THREADS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--directory", type=Path, help="of the checkpoint; default: a new one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--device-blocks", type=int, default=0, help="that live on the device")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        directory = arguments.directory or Path(temporary)
        files = checkpoint(directory, arguments.shape)
        num_bytes = sum(path.stat().st_size for path in files)
        homes = homes_of(arguments)
        rows = [measure(directory, files, homes) for _ in range(1 + arguments.repeats)]
    figures = report(rows[1:], num_bytes)
    asked = {name: getattr(arguments, name) for name in ("shape", "device", "device_blocks")}
    figures |= {"machine": machine_facts(), **asked}
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    for which in ("best", "median"):
        row = figures[which]
        print(
            f"{which:>6}: disk {row['disk_gb_s']:.2f}, to memory {row['to_memory_gb_s']:.2f}, load "
            f"{row['load_gb_s']:.2f} GB/s: {row['of_disk']:.2f} of the disk, "
            f"{row['of_to_memory']:.2f} of what reaches memory"
        )
    print(f"most memory above the homes: {figures['most_bytes_above_homes'] / 1e6:.0f} MB")
    for row in figures["runs"]:
        read = row["reads"]
        longest = sorted(read["rests_s"], key=lambda rest: -rest[1])[:4]
        rests = ", ".join(f"{length:.2f} s at {at:.2f}" for at, length in longest)
        print(f"load {row['load_s']:.2f} s: read for {read['busy_s']:.2f} s, rests {rests}")


def checkpoint(directory: Path, shape: str) -> list[Path]:
    """Return the safetensors files of a checkpoint of the shape; write it if it is not there."""
    if not (directory / "config.json").is_file():
        device = "cuda" if torch.cuda.is_available() else "cpu"  # where values are drawn sooner
        model = outcore.from_config(
            shape_config(shape), device=device, dtype=torch.bfloat16, weights="host", state="host"
        )
        model.save_pretrained(directory)
        outcore.engine_of(model).close()
        os.sync()
    return sorted(directory.glob("*.safetensors"))


def homes_of(arguments: Any) -> dict[str, Any]:
    """Return options of ``outcore.load``: the first blocks on the device, the rest on the host."""
    num_blocks, first = shape_config(arguments.shape).num_hidden_layers, arguments.device_blocks
    weights = first * ["device"] + (num_blocks - first) * ["host"]
    return {"device": arguments.device, "weights": weights, "state": "host"}


def measure(directory: Path, files: list[Path], homes: dict[str, Any]) -> dict[str, Any]:
    evict(files)
    disk_s = read_files(files, None)
    num_bytes = sum(path.stat().st_size for path in files)
    new_memory_s = touch(new_memory(num_bytes))
    to_memory_s = read_files(files, new_memory(num_bytes))
    touch(new_memory(num_bytes))
    evict(files)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    with recording(torch.device(homes["device"])) as reads:
        start = time.perf_counter()
        model = outcore.load(directory, dtype=torch.bfloat16, **homes)
        load_s = time.perf_counter() - start
    peak = status_bytes("VmHWM")
    units = outcore.engine_of(model).units
    homes_bytes = sum(unit.home.nbytes for unit in units if unit.home.device.type == "cpu")
    outcore.engine_of(model).close()
    del model, units
    gc.collect()
    return {
        "disk_s": disk_s,
        "new_memory_s": new_memory_s,
        "to_memory_s": to_memory_s,
        "load_s": load_s,
        "bytes_above_homes": peak - before - homes_bytes,
        "reads": use_of_lanes(reads.spans())["disk read"],
    }


def report(rows: list[dict[str, Any]], num_bytes: int) -> dict[str, Any]:
    def rates(pick: Any) -> dict[str, float]:
        kinds = ("disk", "to_memory", "load", "new_memory")
        seconds = {kind: pick([row[f"{kind}_s"] for row in rows]) for kind in kinds}
        return {
            **{f"{kind}_gb_s": num_bytes / seconds[kind] / 1e9 for kind in kinds},
            "of_disk": seconds["disk"] / seconds["load"],
            "of_to_memory": seconds["to_memory"] / seconds["load"],
        }

    return {
        "num_bytes": num_bytes,
        "best": rates(min),
        "median": rates(statistics.median),
        "most_bytes_above_homes": max(row["bytes_above_homes"] for row in rows),
        "runs": rows,
    }


def evict(files: list[Path]) -> None:
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_files(files: list[Path], memory: np.ndarray[Any, Any] | None) -> float:
    """Return the seconds that it takes to read every byte once, and to copy it to ``memory``."""
    opened = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    all_pieces, end = [], 0
    for file, path in zip(opened, files, strict=True):
        size = path.stat().st_size
        all_pieces += [(file, offset, end + offset) for offset in range(0, size, PIECE_BYTES)]
        end += size
    pieces, lock = iter(all_pieces), threading.Lock()
    buffers = [new_memory(PIECE_BYTES) for _ in range(NUM_THREADS)]

    def work(buffer: np.ndarray[Any, Any]) -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            file, offset, place = piece
            count = os.preadv(file, [buffer.data], offset)
            if memory is not None:
                memory[place : place + count] = buffer[:count]

    threads = [threading.Thread(target=work, args=[buffer]) for buffer in buffers]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for file in opened:
        os.close(file)
    return seconds


def new_memory(num_bytes: int) -> np.ndarray[Any, Any]:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def touch(memory: np.ndarray[Any, Any]) -> float:
    """Return the seconds until the memory is there."""
    start = time.perf_counter()
    torch.from_numpy(memory).zero_()
    return time.perf_counter() - start


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


if __name__ == "__main__":
    main()
