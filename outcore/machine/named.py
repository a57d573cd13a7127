"""A machine by its name: one of the catalogue, or "here"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outcore.machine.catalogue import catalogue_machine
from outcore.machine.machine import Machine

if TYPE_CHECKING:
    from outcore.machine.probe.run import Progress

HERE = "here"


def machine_named(name: str, *, progress: Progress | None = None) -> Machine:
    """Return the machine of that name: "here", or one of ``outcore probe --list``."""
    return here(progress=progress) if name == HERE else catalogue_machine(name)


def here(*, progress: Progress | None = None) -> Machine:
    """Return this machine: as it was probed before, or probed now (under a minute).

    ``progress`` is told each step that begins, its number, and how many there are.
    """
    from outcore.machine.probe import probe  # imports torch, which a catalogue does not need

    return probe(progress=progress).machine
