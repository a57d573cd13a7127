"""tokenize(): files of rows in, a cache of tokens out; made once, then only opened."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcore.data.cache_format import FORMAT_VERSION, BuildReport, remove_cache
from outcore.data.cache_writer import CacheWriter
from outcore.data.durable_files import locked
from outcore.data.encode import EncodedBatch, EncodeOptions, fields_of
from outcore.data.raw_rows import RawBatch, RowFault
from outcore.data.row_format import ALL_FIELDS, RowFormat, find_row_format, kind_of
from outcore.data.sources import Paths, Source, find_sources, fingerprint
from outcore.data.token_cache import TokenCache, open_cache
from outcore.data.workers import Work, encode_here, encode_in_processes
from outcore.errors import BadRow, StoreError, UnknownFormat

_REPORTED_BAD_ROWS = 20
_MOST_WORKERS = 16
_BYTES_OF_A_WORKER = 8 << 20  # a process takes seconds to start, and as long for these


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the making of a cache is."""

    num_rows: int
    num_bytes: int
    total_bytes: int


def tokenize(
    paths: Paths,
    tokenizer: Any,
    *,
    cache_dir: str | os.PathLike[str],
    options: EncodeOptions | None = None,
    num_workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TokenCache:
    """Return the tokens of the rows at ``paths``, from the cache where they are in it.

    num_workers: processes, of which no more are started than cores can use; None for as many as
    there are cores, and as the data is worth; where it is worth none, threads.
    The same bytes come out for any number of them.
    """
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, not {num_workers}")
    options = options or EncodeOptions()
    sources = find_sources(paths)
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    # What a cache is called does not depend on what the files hold: a changed file's cache takes
    # the place of the old one.
    key = _hash([[str(s.path) for s in sources], tokenizer_hash, asdict(options)])[:16]
    made_from = {
        "format_version": FORMAT_VERSION,
        "sources": fingerprint(sources),
        "tokenizer": tokenizer_hash,
        "options": asdict(options),
    }
    cache_dir = Path(cache_dir).absolute()
    directory = cache_dir / f"tokens-{key}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{cache_dir} cannot be made: {error.strerror}", path=cache_dir) from error
    with locked(cache_dir / f"tokens-{key}.lock"):
        cache = open_cache(directory, made_from)
        if cache is None:
            remove_cache(directory)
            _build(directory, sources, tokenizer, options, num_workers, progress, made_from)
            cache = open_cache(directory, made_from)
    if cache is None:
        raise StoreError(
            f"{directory} does not hold what was just written there. Its disk damages data: name "
            "another cache_dir",
            path=directory,
        )
    return cache


def _build(
    directory: Path,
    sources: Sequence[Source],
    tokenizer: Any,
    options: EncodeOptions,
    num_workers: int | None,
    progress: Callable[[Progress], None] | None,
    made_from: dict[str, Any],
) -> None:
    writer = CacheWriter(directory, max_token_id=max(tokenizer.get_vocab().values()))
    try:
        batches = (batch for source in sources for batch in source.read(ALL_FIELDS))
        work = _Work(batches, options.row_format)
        total_bytes = sum(source.size_bytes() for source in sources)
        num_processes = _usable(num_workers) or _worthwhile_workers(total_bytes)
        if num_processes > 1:
            encoded = encode_in_processes(work, tokenizer, options.loss_on, num_processes)
        else:
            num_threads = num_workers or _worthwhile_threads(tokenizer)
            encoded = encode_here(work, tokenizer, options.loss_on, num_threads)
        report = _write(writer, encoded, options, total_bytes, progress)
        if not writer.num_documents or work.row_format is None:
            where = ", ".join(str(source.path) for source in sources)
            if not report.num_rows:
                raise ValueError(f"{where}: there is no row in it")
            raise ValueError(
                f"{where}: no row of {report.num_rows} can be used ({report.num_bad_rows} bad, "
                f"{report.num_empty_rows} empty){_first_fault(report)}"
            )
        if fingerprint(sources) != made_from["sources"]:
            raise StoreError("the files of training data changed while they were read; start again")
        writer.finish(
            made_from=made_from,
            row_format=work.row_format,
            pad_token_id=_pad_token_id(tokenizer),
            report=report,
        )
    except BaseException:
        writer.abandon()
        raise


def _first_fault(report: BuildReport) -> str:
    """Return where and why the first bad row is one, which may be why all of them are."""
    if not report.first_bad_rows:
        return ""
    path, line, why = report.first_bad_rows[0]
    return f"; {path}, line {line}: {why}"


def _usable(num_workers: int | None) -> int | None:
    """Return how many of them can be of use: each takes some hundred megabytes, work or no work."""
    return num_workers and min(num_workers, max(_MOST_WORKERS, os.cpu_count() or 1))


def _worthwhile_workers(total_bytes: int) -> int:
    return max(1, min(_MOST_WORKERS, os.cpu_count() or 1, total_bytes // _BYTES_OF_A_WORKER))


def _worthwhile_threads(tokenizer: Any) -> int:
    """Only a fast tokenizer works without the interpreter, which threads would wait for."""
    is_fast = getattr(tokenizer, "is_fast", False)
    return min(_MOST_WORKERS, os.cpu_count() or 1) if is_fast else 1


class _Work:
    """The batches, each with the format of its file, which is that of the file's first row."""

    def __init__(self, batches: Iterable[RawBatch], row_format: RowFormat | None) -> None:
        self._batches = batches
        self._named = row_format
        self.row_format = row_format  # of the first file that has rows

    def __iter__(self) -> Iterator[Work]:
        path, found = None, self._named
        for batch in self._batches:
            if batch.path != path:
                path, found = batch.path, self._named
            if found is None:
                found = self._format_of(batch)
            yield batch, found

    def _format_of(self, batch: RawBatch) -> RowFormat | None:
        try:
            found = _find_format(batch)
        except UnknownFormat:
            if self.row_format is None:
                raise
            return self.row_format  # of the files before it: its first row is a bad one
        self._check_kind(batch, found)
        self.row_format = self.row_format or found
        return found

    def _check_kind(self, batch: RawBatch, found: RowFormat | None) -> None:
        """Refuse texts beside chats, or pairs beside either: one run trains on one kind."""
        if found is None or self.row_format is None:
            return
        kind, before = kind_of(found), kind_of(self.row_format)
        if kind != before:
            why = f"has {kind}, and the files before it {before}: train on each in a run of its own"
            raise UnknownFormat(batch.path, batch.rows[0].line, why)


def _find_format(batch: RawBatch) -> RowFormat | None:
    """Return the format of the first row that can be read; None if none can."""
    for row in batch.rows:
        if isinstance(row.value, str):
            return "text"
        try:
            fields = fields_of(row)
        except RowFault:
            continue
        try:
            return find_row_format({**dict.fromkeys(batch.other_columns), **fields})
        except RowFault as fault:  # not a matter of one row, so nothing to skip
            raise UnknownFormat(batch.path, row.line, str(fault)) from None
    return None


def _write(
    writer: CacheWriter,
    encoded: Generator[EncodedBatch, None, None],
    options: EncodeOptions,
    total_bytes: int,
    progress: Callable[[Progress], None] | None,
) -> BuildReport:
    num_rows = num_bad = num_empty = num_without_tools = num_bytes = 0
    first_bad: list[tuple[str, int, str]] = []
    try:
        for batch in encoded:
            if batch.faults and options.on_bad_row == "raise":
                raise BadRow(batch.path, *batch.faults[0])
            for document in batch.documents:
                writer.add(document)
            num_rows += batch.num_rows
            num_bad += len(batch.faults)
            num_empty += batch.num_empty
            num_without_tools += batch.num_without_tools
            num_bytes += batch.num_bytes
            if len(first_bad) < _REPORTED_BAD_ROWS:
                first_bad += [(batch.path, line, why) for line, why in batch.faults]
            if progress is not None:
                done = min(num_bytes, total_bytes)
                progress(Progress(num_rows=num_rows, num_bytes=done, total_bytes=total_bytes))
    finally:
        encoded.close()  # which ends its processes
    return BuildReport(
        num_rows=num_rows,
        num_bad_rows=num_bad,
        num_empty_rows=num_empty,
        num_rows_without_tools=num_without_tools,
        first_bad_rows=tuple(first_bad[:_REPORTED_BAD_ROWS]),
    )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of all that decides which tokens a text or a chat becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: object = None
    if backend is not None:
        rules = json.loads(backend.to_str())
        assert isinstance(rules, dict)
        for state in ("truncation", "padding"):  # of the last call
            rules.pop(state, None)
    return _hash(
        [
            type(tokenizer).__name__,
            rules,
            sorted(tokenizer.get_vocab().items()),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            [getattr(tokenizer, f"add_{end}_token", None) for end in ("bos", "eos")],
            bool(getattr(tokenizer, "split_special_tokens", False)),
            tokenizer.chat_template,
        ]
    )


def _pad_token_id(tokenizer: Any) -> int:
    """Return what fills sequences up; it is never attended to, so any id will do."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
