"""The room that a run's output takes on its disk, asked for before the first step."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from outcore.checkpoint import calls
from outcore.errors import StoreError
from outcore.units import format_bytes

BESIDE_MODEL_BYTES = 32 << 20  # configs, tokenizer
BESIDE_CHECKPOINT_BYTES = 8 << 20  # its manifest, and what the file system needs for its own
_MARGIN_BYTES = 64 << 20  # these, metrics, report


def model_bytes(model: nn.Module, *, only_adapters: bool) -> int:
    """Return what the model directory takes that a run ends with."""
    saved = [p for p in model.parameters() if p.requires_grad or not only_adapters]
    return sum(p.numel() * p.element_size() for p in saved)


def check_room_for_model(output: Path, num_bytes: int) -> None:
    """Refuse a disk that could not take the model at the end."""
    free = calls.free_bytes(output)
    if num_bytes + _MARGIN_BYTES > free:
        raise StoreError(
            f"{output}: the model takes {format_bytes(num_bytes)}, and "
            f"{format_bytes(_MARGIN_BYTES)} are left to spare; {format_bytes(free)} are free "
            "there. Free space, or name another --output.",
            path=output,
        )


def are_on_one_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev
