"""What a probe found, as one value: every figure, how it was measured, and the Machine it makes.

Written to and read from plain JSON values; reading refuses whatever does not fit the fields.
"""

from __future__ import annotations

import math
import typing
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from outcore.machine.machine import Machine

FORMAT_VERSION = 3
Sharing = Literal["separate", "coherent", "unified"]
"""separate: copies over a link. coherent: two memories that both sides can address (Grace Hopper);
copies still pay. unified: one memory."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the machine is, without measuring: this decides whether a kept report is its own."""

    device_type: str  # "cuda" or "cpu"
    device_name: str
    device_total_bytes: int
    cpu_name: str
    num_cores: int
    host_total_bytes: int
    driver: str
    torch_version: str
    sharing: Sharing


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """What a program could still take when it was looked at; of one memory on a unified machine."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class PieceCopy:
    """Pinned copies, back to back, in pieces of one size."""

    piece_bytes: int
    to_device_bytes_s: float
    to_host_bytes_s: float


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    pieces: tuple[PieceCopy, ...]  # the last one is the large copy
    both_ways_bytes_s: float  # each direction, while both run
    pageable_to_device_bytes_s: float
    pageable_to_host_bytes_s: float
    is_pinned: bool


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    read_bytes_s: float
    copy_bytes_s: float  # read and write both counted
    update_bytes_s: float  # AdamW: 14 bytes read and 12 written a parameter
    update_kernel: str  # instruction set of the C++ kernel, or "torch"
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class DiskFigures:
    path: str
    file_system: str
    free_bytes: int
    read_bytes_s: float
    write_bytes_s: float
    both_ways_bytes_s: float  # each way, while as much is read as written
    both_ways_seen_bytes_s: tuple[float, ...]  # whenever it was looked at: that is their median
    is_direct: bool  # O_DIRECT; otherwise through the page cache, with a sync
    is_memory: bool  # tmpfs: a disk in name only


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    dtype: str
    matmul_flops_s: float
    fp8_matmul_flops_s: float | None
    attention_forward_flops_s: float
    attention_backward_flops_s: float
    memory_bytes_s: float  # a copy inside the device's memory, read and write both counted


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """All that a probe found."""

    fingerprint: str
    when: str
    seconds: float
    facts: Facts
    free: FreeMemory
    link: LinkFigures
    host: HostFigures
    disk: DiskFigures | None
    device: DeviceFigures
    gpu_direct_storage: str  # "works", or why not
    notes: tuple[str, ...] = ()

    @property
    def machine(self) -> Machine:
        """The machine as a planner sees it."""
        large = self.link.pieces[-1]
        # A disk that is memory adds no room: what lies there is taken from the host.
        disk = None if self.disk is None or self.disk.is_memory else self.disk
        source = f"measured {self.when} by outcore probe"
        figures: dict[str, Any] = {
            "device_memory_bytes": self.free.device_bytes,
            "host_memory_bytes": self.free.host_bytes,
            "num_cores": self.facts.num_cores,
            "disk_bytes": disk.free_bytes if disk else 0,
            "to_device_bytes_s": large.to_device_bytes_s,
            "to_host_bytes_s": large.to_host_bytes_s,
            "both_ways_bytes_s": self.link.both_ways_bytes_s,
            "pageable_bytes_s": self.link.pageable_to_device_bytes_s,
            "host_read_bytes_s": self.host.read_bytes_s,
            "host_copy_bytes_s": self.host.copy_bytes_s,
            "host_update_bytes_s": self.host.update_bytes_s,
            "disk_read_bytes_s": disk.read_bytes_s if disk else 0.0,
            "disk_write_bytes_s": disk.write_bytes_s if disk else 0.0,
            "disk_both_ways_bytes_s": disk.both_ways_bytes_s if disk else 0.0,
            "matmul_flops_s": self.device.matmul_flops_s,
            "fp8_matmul_flops_s": self.device.fp8_matmul_flops_s,
            "attention_forward_flops_s": self.device.attention_forward_flops_s,
            "attention_backward_flops_s": self.device.attention_backward_flops_s,
            "device_memory_bytes_s": self.device.memory_bytes_s,
        }
        return Machine(
            name="here",
            device_name=self.facts.device_name,
            is_unified=self.facts.sharing == "unified",
            has_gpu_direct_storage=self.gpu_direct_storage == "works",
            sources={name: source for name, value in figures.items() if value},
            **figures,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, with the Machine that it makes."""
        return {
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "machine": asdict(self.machine),
        }

    @classmethod
    def from_dict(cls, values: Any) -> ProbeReport:
        """Return the report that ``to_dict`` wrote; ValueError for anything else."""
        if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"not a probe report of format {FORMAT_VERSION}")
        own = {field.name: values.get(field.name) for field in fields(cls)}
        report = _read(cls, own, "report")
        if not report.link.pieces:
            raise ValueError("report.link.pieces is empty")
        return report


def _read(kind: type[_T], values: Any, where: str) -> _T:
    """Return ``values`` as the dataclass ``kind``, each field checked against its annotation."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} is no object")
    hints = typing.get_type_hints(kind)
    if set(values) != set(hints):
        raise ValueError(f"{where} has other fields than {', '.join(sorted(hints))}")
    return kind(**{name: _value(hints[name], values[name], f"{where}.{name}") for name in hints})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return ``value`` if it is what ``hint`` says; lists become tuples, objects dataclasses."""
    options = typing.get_args(hint)
    if type(None) in options:
        return None if value is None else _value(options[0], value, where)
    if typing.get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(options[0], item, where) for item in value)
    if typing.get_origin(hint) is Literal and value in options:
        return value
    if hasattr(hint, "__dataclass_fields__"):
        return _read(hint, value, where)
    if hint is float and type(value) in (int, float) and 0 < value < math.inf:
        return float(value)
    if hint in (int, str, bool) and type(value) is hint and not (hint is int and value < 0):
        return value
    raise ValueError(f"{where} is {value!r}")
