"""What kind of device a machine computes on, and the type that it computes in by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from outcore.machine.machine import Machine


def device_type(machine: Machine) -> Literal["cpu", "cuda"]:
    return "cpu" if machine.device_name.lower().startswith("cpu") else "cuda"


def default_dtype(machine: Machine, state_format: str) -> Literal["bf16", "fp32"]:
    """Return what ``offload`` computes in: fp32 on a CPU, where the state's format allows it."""
    return "fp32" if device_type(machine) == "cpu" and state_format == "fp32" else "bf16"


def computing_on_cpu(machine: Machine) -> Machine:
    """Return the machine with its CPU as the device, which copies though the memory is one."""
    if device_type(machine) == "cpu":
        return replace(machine, is_unified=False)
    return replace(machine, is_unified=False, device_name=f"CPU of {machine.name}")
