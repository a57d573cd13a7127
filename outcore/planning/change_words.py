"""A change of a job in words: as Python's arguments, or as options of the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator

from outcore.machine.machine import Machine
from outcore.planning.memory import largest_budgets, machine_bytes
from outcore.planning.plan import Job, Tier
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
    """Whether a changed budget is more than the machine gives."""
    return bool(_memory_words(asked, changed, machine))


def _differences(asked: Job, changed: Job, machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield what differs and can be asked for on this machine, by name and new value."""
    for name in ("tokens", "micro_batch", "clipping", "state_format", "frozen_weights", "dtype"):
        if getattr(asked, name) != getattr(changed, name):
            yield name, str(getattr(changed, name))
    for tier, num_bytes, is_too_much in _grown(asked, changed, machine):
        if is_too_much:
            continue
        size = _typed(num_bytes)
        path = changed.budgets.disk_path or _PATH
        yield tier, f"{path}:{size}" if tier == "disk" else size


def _typed(num_bytes: int) -> str:
    """Return a size to type in: of what is needed whole, a decimal would lose too much."""
    size = format_bytes(num_bytes).replace(" ", "")
    is_near = num_bytes - _LEAST_LOST < parse_bytes(size) <= num_bytes
    return size if is_near else f"{num_bytes >> 20}MiB"


def round_up(num_bytes: int) -> int:
    """Return the next number that is printed with one decimal and read back as no less."""
    unit = 1024.0
    while num_bytes >= 1024 * unit:
        unit *= 1024
    return math.ceil(math.ceil((num_bytes + 16) / unit * 10) * unit / 10) + 8


def _memory_words(asked: Job, changed: Job, machine: Machine) -> list[str]:
    """Return what a machine would have that gives these budgets, were none asked for."""
    names = {"device": "device memory", "host": "host memory", "disk": "disk"}
    has = {
        "device": machine.device_memory_bytes,
        "host": machine.host_memory_bytes,
        "disk": machine.disk_bytes,
    }
    part = ""
    if machine.is_unified:
        names["device"] = "memory"
        if machine.device_memory_bytes < machine.host_memory_bytes:
            part = " for its device"
    return [
        f"{format_bytes(_whole(tier, num_bytes, machine))} of {names[tier]} (the machine has "
        f"{format_bytes(has[tier])}{part if tier == 'device' else ''})"
        for tier, num_bytes, is_too_much in _grown(asked, changed, machine)
        if is_too_much
    ]


def _whole(tier: Tier, budget: int, machine: Machine) -> int:
    """Return what the machine would have, as it is printed; budgets of all of it are so already."""
    whole = machine_bytes(tier, budget, machine)
    return whole if whole == budget else round_up(whole)


def _grown(asked: Job, changed: Job, machine: Machine) -> Iterator[tuple[Tier, int, bool]]:
    """Yield each tier whose budget changed: its new bytes, and whether the machine gives less.

    One memory that is too small is the device's alone: the host's budget is of the same bytes.
    """
    is_one_too_small = False
    for tier, most in largest_budgets(machine).items():
        if tier == "host" and is_one_too_small:
            continue
        before, after = (getattr(job.budgets, f"{tier}_bytes") for job in (asked, changed))
        if before != after and after is not None:
            is_one_too_small = machine.is_unified and after > most
            yield tier, after, after > most
