"""Host memory of exactly the size asked for, pinned where a GPU copies from it.

torch's pinned allocator rounds up to powers of two and pins at 2 GB/s; an anonymous map backed by
huge pages, touched in parallel and then registered with CUDA, is exact and about four times faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from outcore.errors import OutOfBudget
from outcore.store.ledger import Hold, Ledger
from outcore.units import format_bytes

OUT_OF_HOST = "Raise host_memory, free host memory, or train fewer parameters."
_ALIGN_BYTES = 256
_MADV_POPULATE_WRITE = 23  # Linux 5.14 has it, Python's mmap has no name for it
_POPULATED_AT_ONCE_BYTES = 64 << 20


def aligned_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes that a span takes in an arena."""
    return -(-numel * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES


class _PinnableMap(mmap.mmap):
    """An anonymous map that unpins itself before it is unmapped.

    A map that goes while CUDA still has it registered leaves its addresses unusable: the next map
    there cannot be pinned.
    """

    pinned_address: int | None = None
    hold: Hold | None = None  # its bytes in the books, for as long as a span is in use

    def __del__(self) -> None:
        if self.pinned_address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.pinned_address)
            self.pinned_address = None


class HostArena:
    """One region of host memory that hands out flat, aligned, zeroed spans and grows no further.

    touch: whether its pages are made now, so that none is left for the first step. Memory that is
        filled at once needs it not: its pages are ``made_ahead`` of the filling.
    """

    _warned_pageable = False

    def __init__(
        self, num_bytes: int, *, purpose: str, ledger: Ledger, pin: bool, touch: bool = True
    ) -> None:
        self.purpose = purpose
        self.num_bytes = max(num_bytes, _ALIGN_BYTES)
        self.is_pinned = False
        self._used_bytes = 0
        self._ledger = ledger
        hold = ledger.hold(purpose, self.num_bytes, remedy=OUT_OF_HOST)
        try:
            # Python's default is a shared map, which by default gets no huge pages.
            self._map = _PinnableMap(
                -1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError) as error:
            hold.give_back()
            raise OutOfBudget(
                f"host memory: {purpose} needs {format_bytes(self.num_bytes)}, which the system "
                f"refused to map ({error})"
            ) from error
        self._map.hold = hold
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if touch:
            self._bytes.zero_()  # in parallel
        if pin:
            self.pin()

    def span(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next ``numel`` elements of the arena, zeroed."""
        start = self._used_bytes
        end = start + numel * dtype.itemsize
        assert end <= self.num_bytes, f"{self.purpose}: span past the end of the arena"
        self._used_bytes = start + aligned_bytes(numel, dtype)
        return self._bytes[start:end].view(dtype)

    def populate(self, start: int, num_bytes: int) -> bool:
        """Make pages, whatever is in those that are there; whether the system can.

        Others may write to them meanwhile: nothing is overwritten.
        """
        num_bytes = min(num_bytes, self.num_bytes - start)
        address = ctypes.c_void_p(self._bytes.data_ptr() + start)
        # Not mmap.madvise, which would keep other threads of Python waiting.
        made = ctypes.CDLL(None).madvise(address, ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)
        return bool(made == 0)

    def pin(self) -> None:
        """Register the memory with CUDA; where that fails it stays pageable, with a warning."""
        if self.is_pinned:
            return
        if hasattr(mmap, "MADV_DONTFORK"):
            # The system would copy pinned pages for every process that is forked, all at once, and
            # others as they are written. As with torch's pinned memory, no child can read it.
            self._map.madvise(mmap.MADV_DONTFORK)
        address = self._bytes.data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(address, self.num_bytes, 0))
        self.is_pinned = error == 0
        if self.is_pinned:
            self._map.pinned_address = address
            return
        _forget_cuda_error()
        if not HostArena._warned_pageable:
            HostArena._warned_pageable = True
            warnings.warn(
                f"host memory could not be pinned ({self.purpose}, {format_bytes(self.num_bytes)}, "
                f"CUDA error {error}); copies are pageable: still right, about 8x slower. "
                "Raise the locked-memory limit (ulimit -l) or lower host memory use.",
                RuntimeWarning,
                stacklevel=2,
            )


@contextlib.contextmanager
def made_ahead(arenas: Sequence[HostArena], *, pin: bool) -> Iterator[None]:
    """Make the pages of the arenas, in their order, beside whoever fills them; then pin them.

    Who fills memory that is new waits for every page to be zeroed, and a disk waits for them.
    """
    is_over = threading.Event()
    device = torch.cuda.current_device() if pin and torch.cuda.is_available() else None

    def make() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread's is the first: not ours to take memory of
        for arena in arenas:
            for start in range(0, arena.num_bytes, _POPULATED_AT_ONCE_BYTES):
                if is_over.is_set():
                    return
                if not arena.populate(start, _POPULATED_AT_ONCE_BYTES):
                    break  # an old kernel: filling makes them
        # Not between them: pages have to be there before who fills them, and while memory is
        # registered CUDA keeps other threads' copies waiting.
        for arena in arenas if pin else ():
            if is_over.is_set():
                return
            arena.pin()

    with ThreadPoolExecutor(1, thread_name_prefix="outcore-pages") as thread:
        making = thread.submit(make)
        try:
            yield
            making.result()
        except BaseException:  # Ctrl-C, while the last ones are pinned, too
            is_over.set()
            raise


def _forget_cuda_error() -> None:
    """Clear the error that a refused registration leaves behind for the next CUDA call."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
