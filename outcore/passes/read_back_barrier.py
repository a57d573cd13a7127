"""Makes compiled blocks safe from a race in the code that torch's compiler writes.

A looped reduction may store a buffer in one loop and load it back in the next. Triton spreads the
store and the load over threads as it likes, nothing makes the one wait for the other, and once in a
while a thread reads what is not there yet: gradients that differ from run to run, seen with Gemma
3's query norms (pytorch/pytorch#190517, torch 2.11 and 2.13). A barrier between the loops costs
nothing that can be measured, and changes no other bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CACHE_TAG = "outcore-read-back-barrier"
_SYNCED = "_outcore_synced_stores"


@contextmanager
def installed() -> Iterator[None]:
    """Have every kernel that is compiled wait before it reads a store of its own.

    Kernels compiled without the barrier may lie in the compiler's cache: its key has a tag. Torch's
    settings are a thread's own, so this is around each compilation. The barrier itself stays.
    """
    config: Any = torch.compiler.config
    if not _install() or config.cache_key_tag.endswith(_CACHE_TAG):
        yield
        return
    tag = "-".join(filter(None, (config.cache_key_tag, _CACHE_TAG)))
    with config.patch(cache_key_tag=tag):
        yield


def _install() -> bool:
    """Return False, and do nothing, where torch has no such kernels to mend."""
    try:
        from torch._inductor.codegen.triton import TritonKernel
    except ImportError:
        return False
    if not getattr(TritonKernel.load, "is_mended", False):
        TritonKernel.load = _mended(TritonKernel.load)  # type: ignore[method-assign]
    return True


def _mended(load: Any) -> Any:
    @functools.wraps(load)
    def load_behind_barrier(kernel: Any, name: str, index: Any) -> Any:
        stored = getattr(kernel.cse, "invalidated_stores", ())  # in a loop that has ended
        synced = kernel.__dict__.setdefault(_SYNCED, set())
        if name in stored and name not in synced:
            kernel.body.writeline("tl.debug_barrier()")  # between that loop and the next
            synced.update(stored)
        return load(kernel, name, index)

    load_behind_barrier.is_mended = True  # type: ignore[attr-defined]
    return load_behind_barrier
