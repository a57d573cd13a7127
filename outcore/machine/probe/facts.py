"""What this machine is: names, sizes, versions, free memory. Nothing is timed here."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from outcore.kernels import host_isa
from outcore.store.memory_limits import available_host_bytes

from .report import FORMAT_VERSION, Facts, FreeMemory, Sharing
from .sizes import ProbeSizes

# CUdevice_attribute in cuda.h
_INTEGRATED, _USES_HOST_PAGE_TABLES = 18, 100


def probe_device() -> torch.device:
    """Return what the engine would compute on: the first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def find_facts(device: torch.device) -> Facts:
    host_total_bytes = _host_total_bytes()
    cpu_name = _cpu_name()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        device_name, device_total_bytes = properties.name, int(properties.total_memory)
    else:
        device_name, device_total_bytes = f"CPU: {cpu_name}", host_total_bytes
    return Facts(
        device_type=device.type,
        device_name=device_name,
        device_total_bytes=device_total_bytes,
        cpu_name=cpu_name,
        num_cores=_num_cores(),
        host_total_bytes=host_total_bytes,
        driver=_driver() if device.type == "cuda" else "",
        torch_version=str(torch.__version__),  # a subclass of str
        sharing=_sharing(device),
    )


def free_memory(device: torch.device) -> FreeMemory:
    """Return what can still be taken now; the cgroup's limit counts on the host."""
    free_on_host = available_host_bytes()
    host_bytes = _host_total_bytes() if free_on_host is None else free_on_host
    if device.type != "cuda":
        return FreeMemory(device_bytes=host_bytes, host_bytes=host_bytes)
    torch.cuda.empty_cache()  # what a released model has left to the allocator is free
    device_bytes, _ = torch.cuda.mem_get_info(device)
    return FreeMemory(device_bytes=int(device_bytes), host_bytes=host_bytes)


def fingerprint_of(facts: Facts, sizes: ProbeSizes) -> str:
    """Return a name for this hardware and software; another one means measuring again."""
    what = {
        "format": FORMAT_VERSION,
        "facts": asdict(facts),
        "sizes": asdict(sizes),
        "kernel": host_isa(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _sharing(device: torch.device) -> Sharing:
    if device.type != "cuda":
        return "unified"
    if _cuda_attribute(_INTEGRATED, device):
        return "unified"
    return "coherent" if _cuda_attribute(_USES_HOST_PAGE_TABLES, device) else "separate"


def _cuda_attribute(attribute: int, device: torch.device) -> bool:
    """Ask the driver itself: torch has no name for these. False where that is not possible."""
    if attribute == _INTEGRATED:
        known = getattr(torch.cuda.get_device_properties(device), "is_integrated", None)
        if known is not None:
            return bool(known)
    if torch.version.hip is not None:
        return False
    torch.cuda.init()
    value, handle = ctypes.c_int(0), ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        # By its ordinal among the visible devices, which is how torch counts too.
        error = driver.cuDeviceGet(ctypes.byref(handle), device.index or 0)
        error = error or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    except (OSError, AttributeError):
        return False
    return error == 0 and value.value != 0


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    if torch.version.hip is not None:
        return f"hip {torch.version.hip}"
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ..."
    first = next(iter(_lines("/proc/driver/nvidia/version")), "")
    numbers = [word for word in first.split() if word[:1].isdigit()]
    return f"{numbers[0] if numbers else 'unknown'}, cuda {torch.version.cuda}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
