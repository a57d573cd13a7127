"""Which files hold the training data, what kind each is, and how a change of one is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outcore.data.json_rows import read_array, read_lines, starts_with_bracket
from outcore.data.raw_rows import RawBatch, in_batches
from outcore.data.table_rows import read_parquet, read_saved_dataset
from outcore.data.text_rows import read_text
from outcore.errors import StoreError

Kind = Literal["lines", "array", "parquet", "text", "dataset"]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
_DECOMPRESS = {".gz": "gzip -d", ".bz2": "bzip2 -d", ".xz": "xz -d", ".zst": "zstd -d"}
_AS_UTF_8 = "is UTF-16, and text must be UTF-8: iconv -f UTF-16 -t UTF-8 {path} > NEW"
_FIRST_BYTES = {  # of files whose name says that they hold text
    b"\x1f\x8b": "is compressed, whatever its name says: gzip -dc {path} > NEW",
    b"\xff\xfe": _AS_UTF_8,
    b"\xfe\xff": _AS_UTF_8,
}
_MARKS_OF_PATTERNS = set("*?[")
_HASHED_BYTES = 64 << 10  # at each end of a file


@dataclass(frozen=True)
class Source:
    """A file of rows, or the directory of a saved dataset."""

    path: Path
    kind: Kind

    def files(self) -> tuple[Path, ...]:
        if self.kind != "dataset":
            return (self.path,)
        return tuple(sorted(path for path in self.path.rglob("*") if path.is_file()))

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    def read(self, columns: frozenset[str]) -> Iterator[RawBatch]:
        """Yield the rows as a stream; a table gives no other columns than these."""
        if self.kind == "parquet":
            yield from read_parquet(self.path, columns)
        elif self.kind == "dataset":
            yield from read_saved_dataset(self.path, columns)
        else:
            read = {"lines": read_lines, "array": read_array, "text": read_text}[self.kind]
            with _clear_errors(self.path):
                yield from in_batches(str(self.path), read(self.path))


def find_sources(paths: Paths) -> tuple[Source, ...]:
    """Return what is at ``paths``, in their order; the files of a directory by name."""
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    sources = tuple(source for path in paths for source in _sources_at(Path(path).absolute()))
    if not sources:
        where = ", ".join(map(str, paths)) or "no path"
        raise ValueError(f"no files of training data at {where}: {_known_files()}")
    return sources


def _sources_at(path: Path) -> Iterator[Source]:
    if not path.exists():
        raise ValueError(f"{path} does not exist{_of_pattern(path) or _of_hub(path)}")
    if not path.is_dir():
        if not path.is_file():  # a pipe would never end, or never begin
            raise ValueError(f"{path} is no ordinary file: what is read twice must stay")
        _refuse_compressed(path)
        if path.suffix.lower() not in _SUFFIXES:
            raise ValueError(f"{path} is none of the files that can be read: {_known_files()}")
        yield Source(path, _kind(path))
    elif (path / "dataset_dict.json").is_file():
        splits = sorted(str(info.parent) for info in path.glob("*/dataset_info.json"))
        raise ValueError(f"{path} holds several splits; name one: {', '.join(splits)}")
    elif (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        yield Source(path, "dataset")
    else:
        for file in sorted(path.rglob("*")):
            if not file.is_file() or _is_hidden(file, path):
                continue
            if file.suffix.lower() in _SUFFIXES:
                yield Source(file, _kind(file))
            elif Path(file.stem).suffix.lower() in _SUFFIXES and not file.with_suffix("").exists():
                _refuse_compressed(file)  # it would be left out


def _refuse_compressed(path: Path) -> None:
    if decompress := _DECOMPRESS.get(path.suffix.lower()):
        raise ValueError(f"{path} is compressed: decompress it first ({decompress} {path})")


def _of_pattern(path: Path) -> str:
    """Return what to do about a pattern: in quotes, or in a YAML file, no shell fills it in."""
    folder = next(folder for folder in path.parents if not _MARKS_OF_PATTERNS & set(str(folder)))
    if not _MARKS_OF_PATTERNS & set(path.relative_to(folder).as_posix()):
        return ""
    return (
        f", and patterns are not filled in: name the directory {folder}, or the files one by one "
        "(as a list; --data may be given several times)"
    )


def _of_hub(path: Path) -> str:
    """Return what to do about what looks like the id of a dataset: none is fetched."""
    if path.suffix or path.parent.exists() or path.parent.parent != Path.cwd():
        return ""
    name = path.relative_to(Path.cwd()).as_posix()
    return (
        f". If {name} is a dataset of the Hub, save it first, in Python: "
        f"datasets.load_dataset({name!r}, split='train').save_to_disk('DIR'), and name DIR"
    )


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether it was not put there to be read: copies that editors keep, such as Jupyter's."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _known_files() -> str:
    return f"{', '.join(_SUFFIXES)}, or the directory of a saved dataset"


def _kind(path: Path) -> Kind:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return "parquet"
    with _clear_errors(path):
        with path.open("rb") as file:
            first_bytes = file.read(2)
        if first_bytes in _FIRST_BYTES:
            raise ValueError(f"{path} {_FIRST_BYTES[first_bytes].format(path=path)}")
        if suffix == ".txt":
            return "text"
        return "array" if suffix == ".json" and starts_with_bracket(path) else "lines"


def fingerprint(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return what changes when a file does: its size, its times, and a hash of both its ends."""
    return [_fingerprint(path) for source in sources for path in source.files()]


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with _clear_errors(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest.update(file.read(_HASHED_BYTES))
        file.seek(max(0, status.st_size - _HASHED_BYTES))
        digest.update(file.read(_HASHED_BYTES))
    return {
        "path": str(path),
        "size_bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,  # which nobody can set back, as copies do the other
        "ends_sha256": digest.hexdigest(),
    }


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}", path=path) from error
