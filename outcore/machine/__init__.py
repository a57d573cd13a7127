"""What a machine can do: measured here by a probe, or read from a catalogue of known machines."""

from __future__ import annotations

from .catalogue import catalogue_names
from .machine import Machine
from .named import here, machine_named

__all__ = ["Machine", "catalogue_names", "here", "machine_named"]
