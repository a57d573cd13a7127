"""A machine by its name: one of the catalogue, or "here"."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from outcore.machine.catalogue import catalogue_machine
from outcore.machine.machine import Machine

if TYPE_CHECKING:
    from outcore.machine.probe.run import Progress

HERE = "here"


def machine_named(
    name: str, *, disk: str | PathLike[str] | None = None, progress: Progress | None = None
) -> Machine:
    """Return the machine of that name: "here", or one of ``outcore probe --list``.

    ``disk``: a folder here; of another machine the disk is the catalogue's.
    """
    return here(disk=disk, progress=progress) if name == HERE else catalogue_machine(name)


def here(*, disk: str | PathLike[str] | None = None, progress: Progress | None = None) -> Machine:
    """Return this machine: as it was probed before, or probed now (under a minute).

    ``disk`` is the folder whose disk counts; without it, the one that was probed before does.
    ``progress`` is told each step that begins, its number, and how many there are.
    """
    from outcore.machine.probe import probe  # imports torch, which a catalogue does not need

    return probe(disk=None if disk is None else Path(disk), progress=progress).machine
