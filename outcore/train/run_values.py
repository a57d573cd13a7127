"""What a run's checkpoint says beside its tensors; another program's may say anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcore.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class RunValues:
    step: int  # those taken, also where the optimizer skipped some
    batches: dict[str, int]  # the position in the data
    best: float | None  # held-out loss
    held_out: dict[str, float]  # what it is of, see Corpus; empty without any
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_values(values: dict[str, Any], folder: Path) -> RunValues:
    """Return what ``to_dict`` gave; StoreError for what is of another program."""
    step, best = values.get("step"), values.get("best")
    batches, settings = values.get("batches"), values.get("settings")
    held_out = values.get("held_out", {})
    if (
        type(step) is not int
        or step < 0
        or not isinstance(best, (int, float, type(None)))
        or not isinstance(batches, dict)
        or not isinstance(held_out, dict)
        or not isinstance(settings, dict)
    ):
        raise StoreError(
            f"{folder} holds a checkpoint that is not of `outcore train`: name another --output",
            path=folder,
        )
    return RunValues(step=step, batches=batches, best=best, held_out=held_out, settings=settings)
