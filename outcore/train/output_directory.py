"""The directory that a run writes to: whether it may, and what is said when its disk refuses."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from outcore.checkpoint import calls
from outcore.checkpoint.folder import CheckpointFolder
from outcore.errors import StoreError
from outcore.train.settings import TrainSettings

CHECKPOINTS = "checkpoints"
BEST = "best"  # inside the checkpoints
_OF_A_MODEL = ("config.json", "adapter_config.json")
_OF_A_PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_MOST_PROCESSOR_BYTES = 1 << 20


def checkpoints_in(settings: TrainSettings) -> CheckpointFolder:
    """Return the checkpoints' folder; refuse to begin anew where a run has begun."""
    output = Path(settings.output)
    if output.exists() and Path(settings.model).exists() and output.samefile(settings.model):
        raise ValueError(f"{output} is the model that would be trained: name another --output")
    try:
        calls.make_directories(output)
    except FileExistsError:
        raise ValueError(f"{output} is a file: name another --output") from None
    except OSError as error:
        raise ValueError(
            f"{output} cannot be made: {error.strerror}; name another --output"
        ) from error
    try:
        tempfile.TemporaryFile(dir=output).close()
    except OSError as error:
        raise ValueError(
            f"{output} cannot be written to: {error.strerror}; name another --output"
        ) from error
    folder = CheckpointFolder(output / CHECKPOINTS, keep=max(settings.keep, 1))
    best = CheckpointFolder(folder.path / BEST)
    for found, which in ((folder, "a"), (best, "the best")):
        if found.steps() and not settings.resume:
            raise ValueError(
                f"{output} has {which} checkpoint of step {found.steps()[-1]}: --resume goes on "
                "with that run, another --output begins anew"
            )
    refuse_model(settings, folder)
    return folder


def refuse_model(settings: TrainSettings, folder: CheckpointFolder) -> None:
    """Refuse to write over a model that no checkpoint shows to be this run's."""
    output = Path(settings.output)
    if not folder.steps() and any((output / name).exists() for name in _OF_A_MODEL):
        none = ", and no checkpoint to resume from" if settings.resume else " already"
        raise ValueError(f"{output} holds a model{none}: name another --output")


def copy_processor(model: Path, output: Path) -> None:
    """Copy what says how images are prepared: a model that sees them still does, trained."""
    for name in _OF_A_PROCESSOR:
        source = model / name
        if source.is_file() and source.stat().st_size <= _MOST_PROCESSOR_BYTES:
            (output / name).write_bytes(source.read_bytes())


def check_apart(settings: TrainSettings) -> None:
    """Refuse to write among the data: what the run writes would be data when it is resumed."""
    written = {"output": settings.output, "cache-dir": settings.cache_dir}
    for data in (*settings.data, *settings.eval_data):
        for option, place in written.items():
            if place and Path(data).is_dir() and _is_below(Path(place), Path(data)):
                raise ValueError(
                    f"{place} lies in {data}, of which every file is training data: name another "
                    f"--{option}"
                )


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def remove_if_empty(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # what is kept there helps the next start
            folder.rmdir()


@contextlib.contextmanager
def writing(
    path: Path, remedy: str = "Make room there, or name another --output."
) -> Iterator[None]:
    """Raise what a disk says to a library that knows only its own files, with the remedy."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StoreError(f"{path} cannot be written: {why}. {remedy}", path=path) from error
