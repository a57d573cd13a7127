"""The rows of Parquet files and of datasets that were saved to disk, through pyarrow.

Only the columns that some format of rows has are read, and a few rows at a time. Nothing in these
files is ever run: pyarrows that would do so are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from outcore.data.raw_rows import RawBatch, RawRow, Unreadable
from outcore.errors import MissingLibrary
from outcore.limited_json import read_limited

_ROWS_AT_ONCE = 256
_NAMED_COLUMNS = 20  # of those that are not read
# What pyarrow and datasets raise about a file: also of columns with one name, and dates of Python.
_FAULTS = (OSError, ValueError, KeyError, TypeError, OverflowError)
_SAFE_PYARROW = (14, 0, 1)  # CVE-2023-47248: before, a file's types could bring a pickle along


def read_parquet(path: Path, columns: frozenset[str]) -> Iterator[RawBatch]:
    """Yield the rows of a Parquet file with those of ``columns`` that it has."""
    pyarrow = _pyarrow(path)
    parquet = import_module("pyarrow.parquet")
    size = path.stat().st_size
    done = num_rows = 0
    try:
        with parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            num_rows = max(1, file.metadata.num_rows)
            names = file.schema_arrow.names
            wanted = [name for name in names if name in columns]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
                yield _batch(path, batch, wanted, names, done, size / num_rows)
                done += batch.num_rows
    except (pyarrow.ArrowException, *_FAULTS) as error:
        yield _broken(path, done, num_rows, error)


def read_saved_dataset(path: Path, columns: frozenset[str]) -> Iterator[RawBatch]:
    """Yield the rows of a dataset that ``save_to_disk`` wrote."""
    pyarrow = _pyarrow(path)
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise MissingLibrary(f"{path}: saved datasets need: pip install datasets") from error
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    done = num_rows = 0
    try:
        _check_saved_dataset(path)
        dataset = datasets.load_from_disk(str(path), keep_in_memory=False)
        names = list(dataset.column_names)
        wanted = [name for name in names if name in columns]
        if wanted:
            dataset = dataset.select_columns(wanted)
        num_rows = max(1, len(dataset))
        for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
            yield _batch(path, table, wanted, names, done, size / num_rows)
            done += table.num_rows
    except (pyarrow.ArrowException, *_FAULTS) as error:
        yield _broken(path, done, num_rows, error)


def _check_saved_dataset(path: Path) -> None:
    """Refuse a dataset of files that lie elsewhere, or are none: its own list is a text file."""
    try:
        read_limited(path / "dataset_info.json")
        state = read_limited(path / "state.json")
    except RecursionError as error:
        raise ValueError("its JSON is nested too deep") from error
    files = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(files, list) or not files:
        raise ValueError("state.json names no files")
    for file in files:
        name = file.get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise ValueError(f"state.json names {str(name)[:200]!r}, which is no file in there")


def _pyarrow(path: Path) -> Any:
    try:
        pyarrow = import_module("pyarrow")
    except ImportError as error:
        raise MissingLibrary(f"{path}: this kind of file needs: pip install pyarrow") from error
    version = tuple(int(part) for part in pyarrow.__version__.split(".")[:3] if part.isdigit())
    if version < _SAFE_PYARROW:
        raise MissingLibrary(
            f"{path}: pyarrow {pyarrow.__version__} can be made to run code by a file: "
            "pip install 'pyarrow>=14.0.1'"
        )
    return pyarrow


def _batch(
    path: Path, table: Any, wanted: list[str], names: list[str], done: int, row_bytes: float
) -> RawBatch:
    """Return some rows; without any wanted column, rows without fields."""
    first, end = int(done * row_bytes), int((done + table.num_rows) * row_bytes)
    values = table.select(wanted).to_pylist() if wanted else [{}] * table.num_rows
    rows = tuple(RawRow(done + number, value) for number, value in enumerate(values, start=1))
    others = tuple(name for name in names if name not in wanted)[:_NAMED_COLUMNS]
    return RawBatch(path=str(path), rows=rows, num_bytes=end - first, other_columns=others)


def _broken(path: Path, done: int, num_rows: int, error: Exception) -> RawBatch:
    """Return one row for all that are lost, and say how many those are."""
    lost = f", nor can the {num_rows - done - 1:,} rows after it" if num_rows > done + 1 else ""
    row = RawRow(done + 1, Unreadable(f"cannot be read{lost}: {error}"))
    return RawBatch(path=str(path), rows=(row,), num_bytes=0)
