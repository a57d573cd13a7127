"""A machine by its name: one of the catalogue, or "here"."""

from __future__ import annotations

from outcore.machine.catalogue import catalogue_machine
from outcore.machine.machine import Machine

HERE = "here"


def machine_named(name: str) -> Machine:
    """Return the machine of that name: "here", or one of ``outcore probe --list``."""
    return here() if name == HERE else catalogue_machine(name)


def here() -> Machine:
    """Return this machine: as it was probed before, or probed now (under a minute)."""
    from outcore.machine.probe import probe  # imports torch, which a catalogue does not need

    return probe().machine
