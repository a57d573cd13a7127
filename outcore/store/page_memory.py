"""Memory that O_DIRECT takes: what a caller hands over, seen as bytes and checked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outcore.kernels.checksum import PAGE_BYTES, Bytes


def page_bytes(memory: Tensor | memoryview, num_bytes: int, *, writable: bool = False) -> Bytes:
    """Return ``memory``, which stays alive with the result, as its bytes.

    Raises ValueError unless it is contiguous host memory of ``num_bytes`` that starts on a page.
    """
    if isinstance(memory, Tensor):
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError("disk I/O needs a contiguous tensor in host memory")
        found: Bytes = memory.detach().reshape(-1).view(torch.uint8).numpy()
    else:
        found = np.frombuffer(memory, dtype=np.uint8)
    if found.size != num_bytes:
        raise ValueError(f"disk I/O needs the record's {num_bytes} bytes, not {found.size}")
    if found.ctypes.data % PAGE_BYTES:
        raise ValueError(
            f"disk I/O needs memory that starts on a page of {PAGE_BYTES} bytes, "
            f"not at {found.ctypes.data:#x}"
        )
    if writable and not found.flags.writeable:
        raise ValueError("disk I/O cannot read into memory that is read-only")
    return found
