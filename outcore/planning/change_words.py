"""A change of a job in words: as Python's arguments, or as options of the command line."""

from __future__ import annotations

from collections.abc import Iterator

from outcore.machine.machine import Machine
from outcore.planning.plan import Job
from outcore.units import format_bytes, parse_bytes

_PATH = "PATH"  # of a disk that was not named
_LEAST_LOST = 1024  # bytes; sizes that are named have no more than that beyond their decimal


def python_words(asked: Job, changed: Job, machine: Machine) -> str:
    """Return what to pass to ``outcore.plan``, and what the machine would have to have."""
    arguments = {
        "tokens": "tokens={}",
        "micro_batch": "micro_batch={}",
        "clipping": 'clipping="{}"',
        "state_format": 'state_format="{}"',
        "frozen_weights": 'frozen_weights="{}"',
        "dtype": 'dtype="{}"',
        "device": 'device_memory="{}"',
        "host": 'host_memory="{}"',
        "disk": 'disk="{}"',
    }
    differences = _differences(asked, changed, machine)
    words = [arguments[name].format(value) for name, value in differences]
    words += _memory_words(asked, changed, machine)
    return _listed(words)


def command_line_words(asked: Job, changed: Job, machine: Machine) -> str:
    """Return what to add to ``outcore plan``, and what the machine would have to have."""
    options = {
        "tokens": "--tokens {}",
        "micro_batch": "--micro-batch {}",
        "clipping": "--clip-in-two-passes",
        "state_format": "--state {}",
        "frozen_weights": "--frozen-weights {}",
        "device": "--device-memory {}",
        "host": "--host-memory {}",
        "disk": "--disk {}",
    }
    differences = _differences(asked, changed, machine)
    # The command picks the type itself.
    words = " ".join(options[n].format(value) for n, value in differences if n in options)
    memory = _memory_words(asked, changed, machine)
    return " with ".join(filter(None, [words, _listed(memory)]))


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def is_beyond(changed: Job, asked: Job, machine: Machine) -> bool:
    """Whether a changed budget is more than the machine has."""
    return bool(_memory_words(asked, changed, machine))


def _differences(asked: Job, changed: Job, machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield what differs and can be asked for on this machine, by name and new value."""
    for name in ("tokens", "micro_batch", "clipping", "state_format", "frozen_weights", "dtype"):
        if getattr(asked, name) != getattr(changed, name):
            yield name, str(getattr(changed, name))
    for tier, num_bytes, has_bytes in _grown(asked, changed, machine):
        if num_bytes > has_bytes:
            continue
        size = _typed(num_bytes)
        path = changed.budgets.disk_path or _PATH
        yield tier, f"{path}:{size}" if tier == "disk" else size


def _typed(num_bytes: int) -> str:
    """Return a size to type in: of a disk that is needed whole, a decimal would lose too much."""
    size = format_bytes(num_bytes).replace(" ", "")
    return size if parse_bytes(size) > num_bytes - _LEAST_LOST else f"{num_bytes >> 20}MiB"


def _memory_words(asked: Job, changed: Job, machine: Machine) -> list[str]:
    names = {"device": "device memory", "host": "host memory", "disk": "disk"}
    part = ""
    if machine.is_unified:
        names["device"] = "memory"
        if machine.device_memory_bytes < machine.host_memory_bytes:
            part = " for its device"
    return [
        f"{format_bytes(num_bytes)} of {names[tier]} (the machine has {format_bytes(has_bytes)}"
        f"{part if tier == 'device' else ''})"
        for tier, num_bytes, has_bytes in _grown(asked, changed, machine)
        if num_bytes > has_bytes
    ]


def _grown(asked: Job, changed: Job, machine: Machine) -> Iterator[tuple[str, int, int]]:
    """Yield each tier whose budget changed: its new bytes, and those of the machine.

    One memory that is too small is the device's alone: the host's budget is of the same bytes.
    """
    has = {
        "device": machine.device_memory_bytes,
        "host": machine.host_memory_bytes,
        "disk": machine.disk_bytes,
    }
    for tier, has_bytes in has.items():
        if tier == "host" and machine.is_unified:
            device_bytes = changed.budgets.device_bytes or 0
            if device_bytes > max(machine.device_memory_bytes, asked.budgets.device_bytes or 0):
                continue
        before, after = (getattr(job.budgets, f"{tier}_bytes") for job in (asked, changed))
        if before != after and after is not None:
            yield tier, after, has_bytes
