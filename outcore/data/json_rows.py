"""The rows of JSONL files and of JSON arrays, cut apart without holding the file in memory.

Cutting is all that happens here, so that the costly part, understanding a row, can be done by other
processes. Files are hostile: no row may be longer than MAX_ROW_BYTES, whatever it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from outcore.data.raw_rows import MAX_ROW_BYTES, RawRow, Unreadable
from outcore.units import format_bytes

_CHUNK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHITESPACE = b" \t\r\n"
_OVER_LINES = (
    "is not JSON by itself, and the object may go on over several lines: a row is one line, or in "
    "a .json file an element of an array"
)
_OUTSIDE_STRINGS = re.compile(rb'["\[\]{},]')


def starts_with_bracket(path: Path) -> bool:
    """Return whether a .json file holds an array; many hold one object a line."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            text = chunk.removeprefix(_BYTE_ORDER_MARK).lstrip(_WHITESPACE)
            if text:
                return text.startswith(b"[")
    return False


def read_lines(path: Path) -> Iterator[tuple[RawRow, int]]:
    """Yield the lines that are not blank, each with its bytes in the file."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            num_bytes = len(line)
            if num_bytes > MAX_ROW_BYTES and not line.endswith(b"\n"):
                num_bytes += _skip_line(file)
                yield RawRow(number, _too_long()), num_bytes
                continue
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            line = line.strip(_WHITESPACE)
            if line == b"{":
                yield RawRow(number, Unreadable(_OVER_LINES)), num_bytes
            elif line:
                yield RawRow(number, line), num_bytes


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of a line and return the number of bytes."""
    num_bytes = 0
    while part := file.readline(_CHUNK_BYTES):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
    return num_bytes


def _too_long() -> Unreadable:
    return Unreadable(f"is longer than {format_bytes(MAX_ROW_BYTES)}")


def read_array(path: Path) -> Iterator[tuple[RawRow, int]]:
    """Yield the elements of an array, each with the bytes from the end of the last one.

    What is inside an element is not looked at, beyond its strings and brackets.
    """
    with path.open("rb") as file:
        elements = _Elements()
        first = True
        while chunk := file.read(_CHUNK_BYTES):
            if first:
                chunk, first = chunk.removeprefix(_BYTE_ORDER_MARK), False
            yield from elements.cut(chunk)
        yield from elements.end()


class _Elements:
    """Cuts an array, given chunk by chunk, into its elements."""

    def __init__(self) -> None:
        self._line = 1
        self._first_line = 1  # of the element
        self._element = bytearray()
        self._num_bytes = 0  # since the last element, also of what is not kept
        self._depth = 0  # 0: before or after the array; 1: between its elements
        self._is_over = False
        self._in_string = False
        self._is_escaped = False  # the next chunk's first character, by a backslash
        self._is_too_long = False
        self._after_comma = False

    def cut(self, chunk: bytes) -> Iterator[tuple[RawRow, int]]:
        position = 0
        while position < len(chunk):
            if self._in_string:
                position = self._pass_string(chunk, position)
                continue
            found = _OUTSIDE_STRINGS.search(chunk, position)
            end = found.start() if found else len(chunk)
            self._keep(chunk[position:end])
            position = end
            if found:
                position += 1
                yield from self._take(found.group())

    def _pass_string(self, chunk: bytes, position: int) -> int:
        """Keep a string up to its next quote, and return the place behind it."""
        quote = chunk.find(b'"', position)
        end = quote + 1 if quote >= 0 else len(chunk)
        text = chunk[position : quote if quote >= 0 else end]
        self._keep(chunk[position:end])
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        if num_backslashes == len(text):  # they may go on from the chunk before
            num_backslashes += self._is_escaped
        is_escaped = num_backslashes % 2 == 1
        if quote >= 0:
            self._in_string = is_escaped
        self._is_escaped = is_escaped and quote < 0
        return end

    def end(self) -> Iterator[tuple[RawRow, int]]:
        if not self._is_over:
            self._first_line = self._first_line if self._element else self._line
            yield self._row(Unreadable("the file ends before its array does"))
        elif self._element:
            yield self._row(Unreadable("more follows after the end of the array"))

    def _take(self, mark: bytes) -> Iterator[tuple[RawRow, int]]:
        """Go on behind a quote, bracket or comma that is in no string."""
        if self._is_over:  # nothing may follow; `end` will say so
            pass
        elif mark == b'"':
            self._in_string = True
        elif self._depth == 1 and mark in b",]":
            if self._element or mark == b"," or self._after_comma:
                yield self._finished()
            self._after_comma = mark == b","
            self._num_bytes += 1
            if mark == b"]":
                self._depth, self._is_over = 0, True
            return
        elif mark in b"[{":
            self._depth += 1
            if self._depth == 1 and mark == b"[" and not self._element:
                self._num_bytes += 1
                return  # the array itself
        elif mark in b"]}":
            self._depth -= 1
        self._keep(mark)

    def _keep(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if not self._element:
            rest = piece.lstrip(_WHITESPACE)
            self._line += piece.count(b"\n", 0, len(piece) - len(rest))
            self._first_line = self._line
            piece = rest
        self._line += piece.count(b"\n")
        if len(self._element) + len(piece) > MAX_ROW_BYTES:
            self._is_too_long = True
            del self._element[1:]  # of a row that cannot be used, only that there is one
            return
        self._element += piece

    def _finished(self) -> tuple[RawRow, int]:
        if self._is_too_long:
            return self._row(_too_long())
        if not self._element:
            self._first_line = self._line
            return self._row(Unreadable("nothing stands between two commas"))
        return self._row(bytes(self._element).rstrip(_WHITESPACE))

    def _row(self, value: bytes | Unreadable) -> tuple[RawRow, int]:
        row = RawRow(self._first_line, value), self._num_bytes
        self._element.clear()
        self._num_bytes = 0
        self._is_too_long = False
        return row
