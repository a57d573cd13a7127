"""The room that a run's output takes on its disk, asked for before the first step."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from outcore.checkpoint import calls
from outcore.checkpoint.contents import checkpoint_bytes
from outcore.errors import StoreError
from outcore.optim.adamw import AdamW
from outcore.units import format_bytes

BESIDE_MODEL_BYTES = 32 << 20  # configs, tokenizer
BESIDE_CHECKPOINT_BYTES = 8 << 20  # its manifest, and what the file system needs for its own
_MARGIN_BYTES = 64 << 20  # these, metrics, report


def model_bytes(model: nn.Module, *, only_adapters: bool) -> int:
    """Return what the model directory takes that a run ends with."""
    saved = [p for p in model.parameters() if p.requires_grad or not only_adapters]
    return sum(p.numel() * p.element_size() for p in saved)


def best_bytes(model: nn.Module, optimizer: AdamW, folder: Path, num_evaluations: int) -> int:
    """Return what the best checkpoint takes more; a new one is whole before the old one goes."""
    each = checkpoint_bytes(model, optimizer)
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return max(0, each * min(2, num_evaluations) - held)


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
