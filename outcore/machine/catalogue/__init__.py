"""Machines by name: published or measured figures, each with its source.

One JSON file a machine. A figure is a value and where it comes from; sizes may be written as people
write them ("24GiB"). Estimated figures say how: plans made from them are as good as that.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from typing import Any

from outcore.machine.machine import Machine
from outcore.units import parse_bytes

_SUFFIX = ".json"
_SIZES = ("device_memory_bytes", "host_memory_bytes", "disk_bytes")


@cache
def catalogue_names() -> tuple[str, ...]:
    """The names that ``catalogue_machine`` knows, sorted."""
    names = (entry.name for entry in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


@cache
def catalogue_machine(name: str) -> Machine:
    """Return the machine of that name; ValueError with the names that come close."""
    if name not in catalogue_names():
        raise ValueError(_unknown(name))
    entry = _entry(name)
    values: dict[str, Any] = {}
    for key, (value, _) in entry["figures"].items():
        values[key] = parse_bytes(value, what=key) if key in _SIZES else value
    return Machine(
        name=name,
        device_name=entry["device_name"],
        is_unified=entry["is_unified"],
        sources={key: source for key, (_, source) in entry["figures"].items()},
        **values,
    )


def catalogue_note(name: str) -> str | None:
    """Return what else there is to know about the machine of that name."""
    note: str | None = _entry(name).get("note")
    return note


@cache
def _entry(name: str) -> dict[str, Any]:
    text = resources.files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    entry: dict[str, Any] = json.loads(text)
    return entry


def _unknown(name: str) -> str:
    known = catalogue_names()
    wanted = name.lower().replace(" ", "-").replace("_", "-")
    close = [other for other in known if wanted and wanted in other]
    close.sort(key=lambda other: not other.startswith(wanted))
    close += [o for o in difflib.get_close_matches(wanted, known, n=3) if o not in close]
    if close:
        return f"no machine named {name!r}; did you mean {' or '.join(close)}?"
    return f"no machine named {name!r}; known: here, {', '.join(known)}"
