"""Finds, loads and checks the C++ library of host kernels.

Owns the one handle to the library and the C signatures. When there is no usable library, says so
in one warning, and everything above runs on torch operations instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
from dataclasses import fields
from pathlib import Path

import torch

from .adamw_scalars import AdamWScalars

LIBRARY_PATH = Path(__file__).with_name("_outcore_kernels.so")
ABI_VERSION = 4  # OC_ABI_VERSION in outcore_kernels.h

_STATUS_TEXT = {
    -1: "a null pointer",
    -2: "a negative size, or one that is not of whole pages",
    -3: "an unknown gradient type",
    -4: "a number of threads below the least",
    -5: "an array that is not aligned to its elements",
    -6: "an instruction set that is unknown or that this CPU lacks",
    -7: "a first element that is not at the start of a block",
}


class ScalarsStruct(ctypes.Structure):
    """``oc_adamw_scalars``: the fields of AdamWScalars, in the same order."""

    _fields_ = [(field.name, ctypes.c_float) for field in fields(AdamWScalars)]


class RecordStruct(ctypes.Structure):
    """``oc_disk_record``."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("sum", ctypes.c_uint64),
        ("is_done", ctypes.c_void_p),
    ]


class CopyRunStruct(ctypes.Structure):
    """``oc_copy_run``."""

    _fields_ = [
        ("start", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
    ]


_ARRAY, _SIZE, _INT, _UINT64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64
_SCALARS = ctypes.POINTER(ScalarsStruct)
# What oc_adamw_compact and oc_adamw_minimal have in common: moments, scales, gradient and on.
_COMPACT = [*[_ARRAY] * 5, _INT, _SIZE, _SCALARS, _UINT64, _UINT64, _SIZE, _INT]
_SUM = ctypes.POINTER(ctypes.c_uint64)
_DONE = ctypes.POINTER(ctypes.c_int64)
_RECORDS = [_INT, ctypes.POINTER(RecordStruct), _SIZE, _SIZE, _INT]
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "oc_isa": (ctypes.c_char_p, []),
    "oc_set_isa": (_INT, [ctypes.c_char_p]),
    "oc_adamw_split": (
        _INT,
        [_ARRAY, _ARRAY, _ARRAY, _ARRAY, _ARRAY, _INT, _SIZE, _SCALARS, _INT],
    ),
    "oc_adamw_fp32": (_INT, [_ARRAY, _ARRAY, _ARRAY, _ARRAY, _INT, _SIZE, _SCALARS, _INT]),
    "oc_adamw_compact": (_INT, [_ARRAY, _ARRAY, *_COMPACT]),
    "oc_adamw_minimal": (_INT, [_ARRAY, *_COMPACT]),
    "oc_split_master": (_INT, [_ARRAY, _ARRAY, _ARRAY, _SIZE, _INT]),
    "oc_join_master": (_INT, [_ARRAY, _ARRAY, _ARRAY, _SIZE, _INT]),
    "oc_read_records": (_INT, _RECORDS),
    "oc_write_records": (_INT, _RECORDS),
    "oc_read_and_copy": (
        _INT,
        [_INT, _SIZE, _SIZE, _ARRAY, _SIZE, ctypes.POINTER(CopyRunStruct), _SIZE, _DONE],
    ),
    "oc_checksum_pages": (_INT, [_ARRAY, _SIZE, _UINT64, _UINT64, _SUM]),
}

_lock = threading.Lock()
_tried = False
_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL | None:
    """The loaded library, or None; the first call loads it and warns when it cannot."""
    global _library, _tried
    with _lock:
        if not _tried:
            _tried = True
            try:
                _library = _load()
            except (OSError, AttributeError) as error:  # AttributeError: a symbol is not there
                warnings.warn(
                    f"Outcore's host kernels are not available ({error}): CPU updates run on "
                    "torch operations, with the same results but several times slower. Reinstall "
                    "outcore where a C++ compiler is found to build them.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return _library


def has_library() -> bool:
    """Whether CPU tensors are handled by the C++ library."""
    return library() is not None


def host_isa() -> str:
    """What updates CPU tensors: "avx512", "avx2", "neon", "scalar", or "torch" without library."""
    loaded = library()
    if loaded is None:
        return "torch"
    name: bytes = loaded.oc_isa()
    return name.decode()


def set_host_isa(name: str) -> None:
    """Force an instruction set, or the best with "auto", for the whole process (tests, benchmarks).

    Raises ValueError when there is no library, or when this CPU lacks the instructions.
    """
    loaded = library()
    if loaded is None or loaded.oc_set_isa(name.encode()) != 0:
        raise ValueError(f"instruction set {name!r} is not available on this machine")


def check_status(status: int) -> None:
    """Raise for an error code of the library; callers have checked their tensors before."""
    if status != 0:
        raise RuntimeError(f"host kernel refused {_STATUS_TEXT.get(status, f'code {status}')}")


def _load() -> ctypes.CDLL:
    if not LIBRARY_PATH.exists():
        raise OSError(f"{LIBRARY_PATH} does not exist")
    _share_openmp_runtime()
    # RTLD_LOCAL, ctypes' default: the library's names are nobody else's business. ctypes drops the
    # GIL during each call.
    loaded = ctypes.CDLL(str(LIBRARY_PATH))
    version = loaded.oc_abi_version()
    if version != ABI_VERSION:
        raise OSError(f"{LIBRARY_PATH} has ABI version {version}, this package needs {ABI_VERSION}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _share_openmp_runtime() -> None:
    """Make torch's OpenMP runtime the one that the library's open GOMP_* symbols resolve to.

    torch's wheels carry libgomp, some under its own name and some as libgomp-<hash>.so.1, so naming
    libgomp.so.1 as a dependency would load a second copy beside the latter: two thread pools that
    fight for the cores. The library therefore names none (see setup.py), and what torch has mapped
    is opened once more here to move its symbols into the global scope. libomp and Intel's libiomp5,
    which other builds of torch use, answer to the same symbols.
    """
    runtimes = openmp_runtimes()
    # Another package may have brought a runtime of its own; torch's goes first. The folder's name
    # is also a prefix of the sibling torch.libs, where some wheels keep it.
    torch_folder = str(Path(torch.__file__).resolve().parent)
    runtimes.sort(key=lambda path: not path.startswith(torch_folder))
    # With no runtime at all, a library built without OpenMP still loads; any other fails next, with
    # a message that names the missing symbol.
    with contextlib.suppress(OSError):
        ctypes.CDLL(runtimes[0] if runtimes else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes mapped into this process (Linux; empty elsewhere)."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    # address perms offset dev inode path: the path is the sixth field and may hold spaces.
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = dict.fromkeys(line[5] for line in lines if len(line) == 6)
    prefixes = ("libgomp", "libomp", "libiomp")
    return [path for path in paths if os.path.basename(path).startswith(prefixes)]
