"""Reads of a checkpoint's files, counted or failing, whether Python makes them or the library."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import pytest

from outcore.weights import file_ranges


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each read from now on."""
    counts: list[int] = []

    def counted(read: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> int:
            counts.append(read(*arguments, **options))
            return counts[-1]

        return call

    monkeypatch.setattr(os, "preadv", counted(os.preadv))
    monkeypatch.setattr(file_ranges, "read_and_copy", counted(file_ranges.read_and_copy))
    return counts


def failing_reads(monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """Let every read fail but the first few: the library does nothing then, Python says why."""
    calls = count()
    preadv, read_and_copy = os.preadv, file_ranges.read_and_copy

    def read(*arguments: Any) -> int:
        if next(calls) >= after:
            raise OSError(5, "Input/output error")
        return preadv(*arguments)

    def copy(*arguments: Any, **options: Any) -> int:
        return read_and_copy(*arguments, **options) if next(calls) < after else 0

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(file_ranges, "read_and_copy", copy)
