"""What kind of device a machine computes on, and the type that it computes in by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from outcore.machine.machine import Machine
from outcore.units import format_bytes, parse_bytes


def device_type(machine: Machine) -> Literal["cpu", "cuda"]:
    return "cpu" if machine.device_name.lower().startswith("cpu") else "cuda"


def default_dtype(machine: Machine, state_format: str) -> Literal["bf16", "fp32"]:
    """Return what ``offload`` computes in: fp32 on a CPU, where the state's format allows it."""
    return "fp32" if device_type(machine) == "cpu" and state_format == "fp32" else "bf16"


def slower_than_predicted(dtype: str, device: str) -> str | None:
    """Return what to say of a plan in bf16 on a CPU, whose figures are those of fp32 products."""
    if device != "cpu" or dtype != "bf16":
        return None
    return (
        "computed in bf16 on a CPU and predicted as fp32: without bf16 instructions it takes ten "
        "times as long, or longer"
    )


def is_parted(machine: Machine) -> bool:
    """Whether device and host have parts of one memory: copies are made, what one has is gone."""
    return device_type(machine) == "cpu" and not machine.is_unified


def computing_on_cpu(machine: Machine, *, device_memory: int | str | None) -> Machine:
    """Return the machine with its CPU as the device: of one memory, in which nothing is copied.

    device_memory: a part of it that is to stand for a device's; the rest is the host's.
    """
    num_bytes = machine.device_memory_bytes if machine.is_unified else machine.host_memory_bytes
    is_cpu = device_type(machine) == "cpu"
    if device_memory is not None:
        asked_bytes = parse_bytes(device_memory, what="device_memory")
        if asked_bytes > num_bytes:
            raise ValueError(
                f"device_memory is {format_bytes(asked_bytes)}, but only "
                f"{format_bytes(num_bytes)} are available to a CPU as device"
            )
    return replace(
        machine,
        device_name=machine.device_name if is_cpu else f"CPU of {machine.name}",
        device_memory_bytes=num_bytes,
        host_memory_bytes=num_bytes,
        is_unified=device_memory is None,
    )
