"""The directory that a run writes to: whether it may, and what is said when its disk refuses."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from outcore.checkpoint import calls
from outcore.checkpoint.folder import CheckpointFolder
from outcore.data.sources import find_sources
from outcore.errors import StoreError
from outcore.train.metrics import FILE_NAME as METRICS
from outcore.train.metrics import is_of_a_run
from outcore.train.settings import TrainSettings

CHECKPOINTS = "checkpoints"
BEST = "best"  # inside the checkpoints
_OF_A_MODEL = ("config.json", "adapter_config.json")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
_OF_A_PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_MOST_PROCESSOR_BYTES = 1 << 20
# Of all that a run writes, what could be named as data.
_READABLE = (
    METRICS,
    *_OF_A_MODEL,
    *_OF_A_PROCESSOR,
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


def checkpoints_in(settings: TrainSettings) -> CheckpointFolder:
    """Return the checkpoints' folder; refuse to begin anew where a run has begun."""
    output = Path(settings.output)
    _refuse_name(settings.output)
    if output.exists() and Path(settings.model).exists() and output.samefile(settings.model):
        raise ValueError(f"{output} is the model that would be trained: name another --output")
    try:
        calls.make_directories(output)
    except FileExistsError as error:
        there = Path(error.filename)
        target = None if there.exists() else there.readlink()
        what = f"a link to {target}, which is not there" if target else "a file"
        raise ValueError(f"{there} is {what}: name another --output") from None
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
    if not folder.steps() and not best.steps():
        _refuse_foreign_metrics(output / METRICS)
    return folder


def _refuse_name(output: str) -> None:
    try:
        output.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{output!a} is not UTF-8, and tokenizers could not be saved there: name another "
            "--output"
        ) from None


def _refuse_foreign_metrics(path: Path) -> None:
    """A new run empties the file: it may be a list of somebody's own figures."""
    with writing(path, "Move it, or name another --output."):  # what cannot be read, too
        is_foreign = path.is_file() and not is_of_a_run(path)
    if is_foreign:
        raise ValueError(
            f"{path} is not of `outcore train`, which would write its own figures over it: move "
            "it, or name another --output"
        )


def refuse_model(settings: TrainSettings, folder: CheckpointFolder) -> None:
    """Refuse to write over a model that no checkpoint shows to be this run's."""
    output = Path(settings.output)
    configs = [name for name in _OF_A_MODEL if (output / name).exists()]
    if folder.steps() or not configs:
        return
    if not any(path for pattern in _WEIGHTS for path in output.glob(pattern)):
        raise ValueError(
            f"{output} holds {' and '.join(configs)} and no weights, as where a model could not be "
            "written: move that away, or name another --output"
        )
    none = ", and no checkpoint to resume from" if settings.resume else " already"
    raise ValueError(f"{output} holds a model{none}: name another --output")


def copy_processor(model: Path, output: Path) -> None:
    """Copy what says how images are prepared: a model that sees them still does, trained."""
    for name in _OF_A_PROCESSOR:
        source = model / name
        if source.is_file() and source.stat().st_size <= _MOST_PROCESSOR_BYTES:
            (output / name).write_bytes(source.read_bytes())


def check_apart(settings: TrainSettings) -> None:
    """Refuse to write among the data: what the run writes would be data when it is resumed.

    Nor over the data.
    """
    written = {"output": settings.output, "cache-dir": settings.cache_dir}
    for data in (*settings.data, *settings.eval_data):
        for option, place in written.items():
            if place and Path(data).is_dir() and _is_below(Path(place), Path(data)):
                raise ValueError(
                    f"{place} lies in {data}, of which every file is training data: name another "
                    f"--{option}"
                )
    _refuse_data_to_be_written(settings)


def _refuse_data_to_be_written(settings: TrainSettings) -> None:
    places = [Path(settings.output) / name for name in _READABLE]
    written = [place for place in places if place.is_file()]
    if not written:
        return
    for source in find_sources([*settings.data, *settings.eval_data]):
        for file in source.files():
            if any(os.path.samefile(file, place) for place in written):
                raise ValueError(
                    f"{file} is data, and the run would write a file of its own there: move it, "
                    "or name another --output"
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
