"""From raw rows to documents of tokens: the work that processes share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outcore.data.chat_tokens import ChatTokenizer, LossOn, Tokens, token_ids
from outcore.data.checked_json import parse_object, text_of
from outcore.data.raw_rows import RawBatch, RawRow, RowFault, Unreadable
from outcore.data.row_format import (
    ROW_FORMATS,
    Chat,
    Example,
    Pair,
    RowFormat,
    Text,
    example_of,
    find_row_format,
)
from outcore.errors import UnsupportedTemplate

OnBadRow = Literal["raise", "skip"]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What decides, beside rows and tokenizer, which tokens come out."""

    row_format: RowFormat | None = None  # found from the first row
    loss_on: LossOn = "answers"  # of a text, every token counts in any case
    on_bad_row: OnBadRow = "raise"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("row_format", (None, *ROW_FORMATS)),
            ("loss_on", ("answers", "last-answer", "all")),
            ("on_bad_row", ("raise", "skip")),
        ):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} must be one of {choices}, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class Document:
    """Tokens that see each other, or a part of them; two in a row make a pair."""

    ids: NDArray[np.uint32]
    counts: NDArray[np.bool_]  # which of them count for the loss
    content_hash: int  # of the row's text, so the same for every tokenizer
    starts: bool = True
    ends: bool = True
    lacks_tools: bool = False  # that the row has, and the chat template leaves out


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """The documents of some rows, and which rows gave none."""

    path: str
    documents: tuple[Document, ...]
    faults: tuple[tuple[int, str], ...]  # line, why
    num_rows: int
    num_empty: int
    num_without_tools: int
    num_bytes: int  # of the source file


class Encoder:
    """Encodes rows; it has no state of its own, so that any process may encode any batch."""

    def __init__(self, tokenizer: Any, loss_on: LossOn) -> None:
        self._tokenizer = tokenizer
        self._chats = ChatTokenizer(tokenizer, loss_on)

    def encode(self, batch: RawBatch, row_format: RowFormat | None) -> EncodedBatch:
        """Encode rows of one format; without one, no row can be understood."""
        documents: list[Document] = []
        faults = []
        num_rows = num_empty = num_without_tools = 0
        for row in batch.rows:
            num_rows += row.ends_document
            try:
                found = list(self._documents(row, row_format))
            except RowFault as fault:
                faults.append((row.line, str(fault)))
                continue
            except UnsupportedTemplate as error:
                where = f"{batch.path}, line {row.line}"
                raise UnsupportedTemplate(f"{where}: {error}") from None
            except RecursionError:  # of a table: the depth of JSON is limited
                faults.append((row.line, "is nested too deep"))
                continue
            num_empty += not found
            num_without_tools += any(document.lacks_tools for document in found)
            documents += found
        return EncodedBatch(
            path=batch.path,
            documents=tuple(documents),
            faults=tuple(faults),
            num_rows=num_rows,
            num_empty=num_empty,
            num_without_tools=num_without_tools,
            num_bytes=batch.num_bytes,
        )

    def _documents(self, row: RawRow, row_format: RowFormat | None) -> Iterator[Document]:
        if isinstance(row.value, str):
            if row_format != "text":
                raise RowFault(f"a text file has no rows of the format {row_format!r}")
            yield from self._text_part(row, row.value)
            return
        fields = fields_of(row)
        if isinstance(row.value, dict):
            fields = {name: _without_nulls(value) for name, value in fields.items()}
        # A row whose format is not known yet is bad in itself, or its batch would have one.
        example = example_of(fields, row_format or find_row_format(fields))
        content_hash = _content_hash(example)
        lacks_tools = self._lacks_tools(example)
        for ids, counts in self._tokens(example):
            yield Document(ids, counts, content_hash, lacks_tools=lacks_tools)

    def _lacks_tools(self, example: Example) -> bool:
        if isinstance(example, Text):
            return False
        return self._chats.leaves_tools_out(
            example.chosen if isinstance(example, Pair) else example
        )

    def _tokens(self, example: Example) -> Iterator[Tokens]:
        if isinstance(example, Text):
            if example.text:
                ids = self._text_ids(example.text, starts=True, ends=True)
                yield ids, np.ones(len(ids), dtype=np.bool_)
        elif isinstance(example, Chat):
            yield self._chats.tokens(example)
        else:
            yield self._chats.tokens(example.chosen, answers_only=True)
            yield self._chats.tokens(example.rejected, answers_only=True)

    def _text_part(self, row: RawRow, text: str) -> Iterator[Document]:
        if not text and row.starts_document and row.ends_document:
            return
        ids = self._text_ids(
            text_of(text, "the file"), starts=row.starts_document, ends=row.ends_document
        )
        counts = np.ones(len(ids), dtype=np.bool_)
        content_hash = _content_hash(Text(text))
        yield Document(ids, counts, content_hash, row.starts_document, row.ends_document)

    def _text_ids(self, text: str, *, starts: bool, ends: bool) -> NDArray[np.uint32]:
        """Tokenise with what the tokenizer puts before a text, and an end token behind it."""
        end = self._tokenizer.eos_token_id
        ids = token_ids(self._tokenizer, text, add_special_tokens=starts)
        if end is not None:
            has_end = bool(ids) and ids[-1] == end
            if ends and not has_end:
                ids = [*ids, end]
            elif not ends and starts and has_end:
                ids = ids[:-1]  # a tokenizer that adds it by itself; the text goes on
        return np.array(ids, dtype=np.uint32)


def fields_of(row: RawRow) -> dict[str, Any]:
    """Return the fields of a row of JSON or of a table, or raise a RowFault."""
    if isinstance(row.value, Unreadable):
        raise RowFault(row.value.why)
    if isinstance(row.value, bytes):
        return parse_object(row.value)
    assert isinstance(row.value, dict)
    return row.value


def _without_nulls(value: Any) -> Any:
    """Return a field of a table without the keys that only other rows have.

    Tables fill those with nulls, however deep: arguments of a tool, of which each has its own.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _content_hash(example: Example) -> int:
    """Return 64 bits of what the example says, whatever file or order it is in."""
    if isinstance(example, Text):
        said: object = example.text
    elif isinstance(example, Chat):
        said = example.messages
    else:
        assert isinstance(example, Pair)
        said = (example.chosen.messages, example.rejected.messages)
    text = said if isinstance(said, str) else json.dumps(said, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
