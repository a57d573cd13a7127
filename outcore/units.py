"""Byte sizes: as people write them, ``"24GiB"`` in and ``"24.0 GiB"`` out; and of numbers."""

from __future__ import annotations

import re
from decimal import Decimal

BYTES_OF = {"bf16": 2, "fp32": 4}  # a number of what is computed in
_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
LEAST_BUDGET_BYTES = 1 << 16  # a smaller number without a unit is one of GiB or MiB
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$", re.ASCII)


def parse_bytes(size: int | str, *, what: str = "size") -> int:
    """Return ``size`` in bytes. Strings take B, KB, MB, GB, TB, KiB, MiB, GiB and TiB."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"{what} must be bytes or a text such as '24GiB', not {size!r}")
    if isinstance(size, str):
        match = _PATTERN.match(size)
        if match is None or match.group(2).lower() not in _FACTORS:
            raise ValueError(f"{what} {size!r} is not a size; write for example '24GiB' or '800MB'")
        num_bytes = int(Decimal(match.group(1)) * _FACTORS[match.group(2).lower()])
    else:
        num_bytes = size
    if num_bytes <= 0:
        raise ValueError(f"{what} must be more than 0 bytes, not {size!r}")
    return num_bytes


def parse_budget(size: int | str, *, what: str = "size") -> int:
    """Return ``parse_bytes(size)``; a small number without a unit has lost its unit."""
    num_bytes = parse_bytes(size, what=what)
    has_unit = isinstance(size, str) and size.strip()[-1].isalpha()
    if num_bytes < LEAST_BUDGET_BYTES and not has_unit:
        unit = "GiB" if num_bytes < 1024 else "MiB"
        raise ValueError(f"{what} is {num_bytes:,} bytes; did you mean {num_bytes}{unit}?")
    return num_bytes


def format_bytes(num_bytes: int | float) -> str:
    """Return ``num_bytes`` with the binary unit that leaves one to four digits before the point."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_rate(rate: float) -> str:
    """Return whole TFLOPS or tokens a second, and three digits of the few of a slow machine."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"


def format_seconds(seconds: float) -> str:
    """Return hundredths of a second, and two digits of what takes less than a tenth."""
    return f"{seconds:.2f}" if seconds >= 0.1 or seconds == 0 else f"{seconds:.2g}"
