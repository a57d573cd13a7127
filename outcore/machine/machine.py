"""A machine as the planner sees it: sizes, bandwidths and arithmetic, as one immutable value.

All rates are what a program gets, not what a data sheet says: bytes and floating-point operations
a second, sustained.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, the host around it, and a disk."""

    name: str
    device_name: str
    device_memory_bytes: int
    host_memory_bytes: int
    num_cores: int
    disk_bytes: int = 0
    is_unified: bool = False  # CPU and device share one memory: nothing is copied between them
    has_gpu_direct_storage: bool = False

    # The link: pinned memory, large copies. ``both_ways``: each direction, while both run.
    to_device_bytes_s: float
    to_host_bytes_s: float
    both_ways_bytes_s: float
    pageable_bytes_s: float

    # Host memory: reading, copying (read + write counted), and AdamW's mix of both.
    host_read_bytes_s: float
    host_copy_bytes_s: float
    host_update_bytes_s: float

    # The disk. ``both_ways``: each direction, while as much is read as written.
    disk_read_bytes_s: float = 0.0
    disk_write_bytes_s: float = 0.0
    disk_both_ways_bytes_s: float = 0.0

    # The device: large bf16 (and fp8) products, causal attention counted at half, own memory.
    matmul_flops_s: float
    fp8_matmul_flops_s: float | None = None
    attention_forward_flops_s: float
    attention_backward_flops_s: float
    device_memory_bytes_s: float

    price_per_hour: float | None = None  # in dollars, where one can be rented
    sources: dict[str, str] = field(default_factory=dict)  # where each figure comes from
