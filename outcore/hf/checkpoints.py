"""The state of a run inside a Trainer's ``checkpoint-N`` directory.

Beside the ordinary model files lies a folder ``outcore`` with what resuming needs: trained weights,
optimizer state, scheduler, random generators. Safetensors and JSON under checksums; no pickle.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import StoreError
from outcore.hf.plain_values import from_plain, to_plain
from outcore.optim.adamw import AdamW

_FOLDER = "outcore"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"
_PICKLED_STATE = ("optimizer.pt", "optimizer.bin")


def save_state(checkpoint: str, model: nn.Module, optimizer: AdamW, scheduler: Any) -> None:
    """Write what the run needs to go on; frozen weights are the model's own and stay out."""
    values = {"scheduler": to_plain(scheduler.state_dict(), "the scheduler's state")}
    with contextlib.closing(_folder(checkpoint)) as folder:  # or each save holds a file open
        run_state.save(folder, model, optimizer, values)


def load_state(
    checkpoint: str, model: nn.Module, optimizer: AdamW, scheduler: Any, *, is_checked: bool
) -> None:
    """Restore weights, optimizer and scheduler.

    Not the random generators: as in transformers, ``load_random`` comes when the data is where it
    was. What draws the order of an epoch at its start must draw it as it was drawn then.
    """
    resumed = run_state.load(
        _folder(checkpoint), model, optimizer, is_checked=is_checked, with_random=False
    )
    assert resumed is not None, "asked for by has_state"
    if scheduler is not None:
        scheduler.load_state_dict(from_plain(resumed.values["scheduler"]))


def load_random(checkpoint: str) -> None:
    """Restore the random generators alone."""
    run_state.load_random(_folder(checkpoint))


def has_state(checkpoint: str) -> bool:
    """Whether the directory holds a run's state; ValueError for one that only a pickle holds."""
    if _folder(checkpoint).steps():
        return True
    pickled = [name for name in _PICKLED_STATE if (Path(checkpoint) / name).exists()]
    if pickled:
        raise ValueError(
            f"{checkpoint} was written by another trainer: its optimizer state is a pickle "
            f"({pickled[0]}), which is not read. Start from its weights instead: "
            f"from_pretrained({checkpoint!r})."
        )
    return False


def newest_whole(output_dir: str) -> str | None:
    """Return the newest checkpoint that was written to its end; None if there is none."""
    found = {
        int(match.group(1)): path
        for path in (Path(output_dir).iterdir() if Path(output_dir).is_dir() else ())
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    }
    for step in sorted(found, reverse=True):
        checkpoint = str(found[step])
        problem = _problem(checkpoint)
        if problem is None:
            return checkpoint
        warnings.warn(f"{checkpoint} cannot be used ({problem}): looking further", stacklevel=3)
    return None


def _problem(checkpoint: str) -> str | None:
    """Return what is wrong with a checkpoint, None if nothing is."""
    try:
        if has_state(checkpoint):
            run_state.check(_folder(checkpoint))
        elif not any(Path(checkpoint).glob("*.safetensors")):
            return "it has neither state nor weights"
        # Written last, and not at once: a run that is killed there leaves it out or cuts it short.
        json.loads((Path(checkpoint) / _TRAINER_STATE).read_text(encoding="utf-8"))
    except StoreError as error:
        return str(error)
    except OSError as error:
        return f"{_TRAINER_STATE}: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


def _folder(checkpoint: str) -> CheckpointFolder:
    return CheckpointFolder(Path(checkpoint) / _FOLDER, keep=1)
