"""Rows that are cached, and what a cache of them is made of."""

from __future__ import annotations

from pathlib import Path

ROWS = [{"text": f"the cat {number} " * (number % 7 + 1)} for number in range(100)]


def cache_files(cache_dir: Path) -> dict[str, bytes]:
    """What is in the only cache of a directory, by kind of file."""
    (directory,) = cache_dir.iterdir()
    return {
        path.name.split("-")[0]: path.read_bytes()
        for path in directory.iterdir()
        if path.name != "manifest.json"
    }
