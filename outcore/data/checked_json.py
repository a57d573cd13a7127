"""One JSON object out of hostile bytes, and text that every tokenizer can take."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from outcore.data.raw_rows import RowFault
from outcore.limited_json import memory_of
from outcore.units import format_bytes

MAX_DEPTH = 64
_MAX_MEMORY_BYTES = 1 << 30  # more than a row of the most bytes that is a text, in any script
_SMALL_BYTES = 1 << 20  # takes little, whatever it holds


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the object that ``raw`` is, or raise a RowFault."""
    value = parse_value(raw)
    if not isinstance(value, dict):
        raise RowFault(f"must be an object, not {name_of(value)}")
    return value


def parse_value(raw: bytes) -> Any:
    """Return whatever ``raw`` is, or raise a RowFault."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowFault(f"is not UTF-8 (byte {error.start} of the row)") from None
    if len(raw) > _SMALL_BYTES and memory_of(raw) > _MAX_MEMORY_BYTES:
        raise RowFault(f"would take more than {format_bytes(_MAX_MEMORY_BYTES)} of memory")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:  # the parser counts too, to some thousands
        raise RowFault(f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise RowFault(f"is not JSON: {error}") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(value):
        raise RowFault(f"is nested more than {MAX_DEPTH} deep")
    return value


def text_of(value: object, field: str) -> str:
    """Return ``value`` if it is text without NUL and without halves of characters."""
    if not isinstance(value, str):
        raise RowFault(f"{field} must be text, not {name_of(value)}")
    if "\0" in value:
        raise RowFault(f"{field} holds a NUL character")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # \ud800 is allowed in JSON, and is no character
            raise RowFault(f"{field} holds half of a character (a lone surrogate)") from None
    return value


def checked_values(value: object, field: str) -> None:
    """Check all texts in a value of lists and objects, however deep."""
    if isinstance(value, str):
        text_of(value, field)
    elif isinstance(value, dict):
        for key, inner in value.items():
            text_of(key, field)
            checked_values(inner, field)
    elif isinstance(value, list):
        for inner in value:
            checked_values(inner, field)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise RowFault(f"{field} holds {name_of(value)}")


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_NAMES = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}


def name_of(value: object) -> str:
    if value is None:
        return "null"
    return _NAMES.get(type(value), type(value).__name__)
