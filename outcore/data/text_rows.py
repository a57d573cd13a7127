"""Plain text files: each one document, read in parts where it is long.

A part ends at the end of a line where there is one, so that hardly a word is cut. The whole file is
checked before its first part is given out: a document is used in full or not at all.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from outcore.data.raw_rows import RawRow, Unreadable

_PART_BYTES = 128 << 10  # a tokenizer takes some hundred times as much
_MAX_PART_CHARACTERS = 512 << 10  # without the end of a line in it


def read_text(path: Path) -> Iterator[tuple[RawRow, int]]:
    """Yield the parts of the file's only document, each with its bytes."""
    size = path.stat().st_size
    fault = _fault(path)
    if fault is not None:
        yield fault, size
        return
    with path.open("rb") as file:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        waiting = ""
        line = 1
        is_first = True
        while chunk := file.read(_PART_BYTES):
            waiting += decoder.decode(chunk)
            cut = waiting.rfind("\n") + 1
            if cut == 0 and len(waiting) > _MAX_PART_CHARACTERS:
                cut = len(waiting)
            if cut:
                part, waiting = waiting[:cut], waiting[cut:]
                # An end of its own, since nobody knows here whether more will follow.
                yield RawRow(line, part, is_first, False), len(part.encode())
                line += part.count("\n")
                is_first = False
        yield RawRow(line, waiting, is_first, True), len(waiting.encode())


def _fault(path: Path) -> RawRow | None:
    """Return the place of the first byte that is not text, and why."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    with path.open("rb") as file:
        is_last = False
        while not is_last:
            chunk = file.read(_PART_BYTES)
            is_last = not chunk
            try:
                decoder.decode(chunk, final=is_last)
            except UnicodeDecodeError as error:
                line += bytes(error.object).count(b"\n", 0, error.start)
                return RawRow(line, Unreadable("is not UTF-8"))
            if (place := chunk.find(0)) >= 0:
                line += chunk.count(b"\n", 0, place)
                return RawRow(line, Unreadable("holds a NUL character; is this a text file?"))
            line += chunk.count(b"\n")
    return None
