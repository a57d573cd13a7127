"""One JSON object out of hostile bytes, and text that every tokenizer can take."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from outcore.data.raw_rows import RowFault

MAX_DEPTH = 64
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the object that ``raw`` is, or raise a RowFault."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowFault(f"is not UTF-8 (byte {error.start} of the row)") from None
    if _is_too_deep(text):
        raise RowFault(f"is nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise RowFault(f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise RowFault(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RowFault(f"must be an object, not {_name_of(value)}")
    return value


def text_of(value: object, field: str) -> str:
    """Return ``value`` if it is text without NUL and without halves of characters."""
    if not isinstance(value, str):
        raise RowFault(f"{field} must be text, not {_name_of(value)}")
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
        raise RowFault(f"{field} holds {_name_of(value)}")


def _is_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found.group()
        if mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif mark in "]}":
            depth -= 1
    return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_NAMES = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}


def _name_of(value: object) -> str:
    if value is None:
        return "null"
    return _NAMES.get(type(value), type(value).__name__)
