"""A file of any size takes the memory of a small one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MEMORY_BYTES = 120 << 20  # more than what imports take; half of it was measured

READ = r"""
import re, sys
sys.path[:0] = {path!r}
from tokenizers_made_here import make_tokenizer
from outcore.data.encode import EncodeOptions
from outcore.data.tokenize import tokenize

def peak_bytes():
    # Not getrusage, whose peak starts with that of the process that started this one.
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1)) * 1024

def read(name, num_workers):
    return tokenize({folder!r} + "/" + name, make_tokenizer(), cache_dir={folder!r} + "/cache",
                    num_workers=num_workers)

read("small.jsonl", 1)
before = peak_bytes()
cache = read({name!r}, {num_workers})
print(cache.num_examples, peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_workers", "num_mib"),
    [("a.jsonl", 1, 200), ("a.jsonl", 2, 200), ("a.json", 1, 200), ("a.txt", 1, 32)],
)
def test_memory_stays_the_same(tmp_path: Path, name: str, num_workers: int, num_mib: int) -> None:
    row = json.dumps({"text": "the cat sat on the mat. " * 8, "unused": "[{ \\" * 512})
    (tmp_path / "small.jsonl").write_text(row)
    piece = {"a.jsonl": row + "\n", "a.json": row + ",\n", "a.txt": "the cat sat\n"}[name]
    num_pieces = (num_mib << 20) // len(piece)
    with (tmp_path / name).open("w") as file:
        file.write("[" if name == "a.json" else "")
        for _ in range(num_pieces):
            file.write(piece)
        file.write(row + "]" if name == "a.json" else "")
    code = READ.format(path=sys.path, folder=str(tmp_path), name=name, num_workers=num_workers)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    num_examples, more_bytes = map(int, done.stdout.split())
    assert num_examples == {"a.jsonl": num_pieces, "a.json": num_pieces + 1, "a.txt": 1}[name]
    print(f"{more_bytes / 2**20:.0f} MiB")
    assert more_bytes < MEMORY_BYTES
