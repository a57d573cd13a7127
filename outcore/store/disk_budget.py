"""How much of which disk may be taken: ``"/mnt/nvme:500GiB"`` in, a ledger out."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from outcore.store import disk_calls
from outcore.store.ledger import Ledger
from outcore.units import format_bytes, parse_budget

_MIN_MARGIN_BYTES = 1 << 30
_MARGIN_FRACTION = 0.02


@dataclass(frozen=True, kw_only=True)
class DiskBudget:
    """A directory for scratch, and the bytes to take there at most; None for what is free."""

    path: Path
    num_bytes: int | None


def parse_disk(text: str | PathLike[str]) -> DiskBudget:
    """Return the budget written as ``PATH:SIZE`` or ``PATH``.

    What follows the last colon is a size unless it holds a slash.
    """
    text = fspath(text)
    path, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        path, colon, size = text, "", ""
    if not path.strip():
        raise ValueError(f"disk {text!r} names no directory; write for example '/mnt/nvme:500GiB'")
    num_bytes = parse_budget(size, what="disk size") if colon else None
    return DiskBudget(path=Path(path.strip()).expanduser(), num_bytes=num_bytes)


def disk_ledger(budget: DiskBudget) -> Ledger:
    """Return the books of the disk tier.

    Without a size the budget is what is free now, less a margin of 1 GiB or 2 %, whichever is
    more: a file system that is full to the last block stops everybody who writes to it.
    """
    if budget.num_bytes is not None:
        return Ledger("disk", budget.num_bytes)
    try:
        free_bytes = disk_calls.free_bytes(budget.path)
    except OSError as error:
        raise ValueError(f"disk {budget.path}: {error.strerror}; name a directory") from error
    margin_bytes = max(_MIN_MARGIN_BYTES, int(_MARGIN_FRACTION * free_bytes))
    if free_bytes <= margin_bytes:
        raise ValueError(
            f"disk {budget.path}: {format_bytes(free_bytes)} are free, of which "
            f"{format_bytes(margin_bytes)} are left to others. Free space there, or give a size."
        )
    return Ledger("disk", free_bytes - margin_bytes)
