"""Every call of cuFile (GPUDirect Storage), and nothing else: one layer, which a test can replace.

Files are registered by torch's own binding. Its read holds the interpreter's lock for as long as
the disk takes, and nothing else could run; the same library is called through ctypes, which drops
the lock.
"""

from __future__ import annotations

import ctypes
import functools

import torch


def is_available() -> bool:
    return hasattr(torch._C, "_gds_register_handle")


def register(fd: int) -> int:
    """Make an open file known to cuFile; raises RuntimeError with its reason."""
    return int(torch._C._gds_register_handle(fd))


def deregister(handle: int) -> None:
    torch._C._gds_deregister_handle(handle)


def read_at(handle: int, address: int, num_bytes: int, offset: int) -> int:
    """Read into device memory; return how many bytes came. OSError where the system refused.

    The calling thread's current device must be that of the memory.
    """
    ctypes.set_errno(0)
    count: int = _library().cuFileRead(handle, address, num_bytes, offset, 0)
    if count >= 0:
        return count
    if count == -1 and (number := ctypes.get_errno()):
        raise OSError(number, "cuFileRead failed")
    raise OSError(0, f"cuFileRead failed with status {-count}")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcufile.so.0", use_errno=True)  # torch has it loaded already
    library.cuFileRead.restype = ctypes.c_ssize_t
    library.cuFileRead.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    return library
