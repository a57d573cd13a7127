"""How the engine has torch compile its functions: the same way for blocks and for losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outcore.engine import read_back_barrier

_NUM_RECOMPILES = 64  # hybrid models have several structures, and each batch shape is its own
_OPTIONS: dict[str, Any] = {
    # To try several variants of an elementwise kernel that writes to its inputs, the compiler keeps
    # a copy of them in pinned memory: 1 GiB at 16,384 tokens of a 7B model, which stays.
    "triton.autotune_pointwise": False,
    # Reductions and padded products are not chosen by the clock: the same kernels in every process.
    "deterministic": True,
}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled for each shape that it is called with."""
    import torch._dynamo  # takes a second: not before it is needed

    config = torch._dynamo.config
    config.recompile_limit = max(_NUM_RECOMPILES, config.recompile_limit)
    read_back_barrier.install()
    options = dict(_OPTIONS)
    if not _has_deterministic_option():
        del options["deterministic"]
    return torch.compile(function, dynamic=False, options=options)


def start_compiler() -> None:
    """Start the processes that compile kernels: they take seconds, in which weights are read.

    torch starts them at the first compilation, and compiles one kernel after the other until they
    are there.
    """
    from torch._inductor import async_compile

    if hasattr(async_compile, "maybe_warm_pool"):
        async_compile.maybe_warm_pool()


def _has_deterministic_option() -> bool:
    """torch 2.9 has not, and asks the clock."""
    import torch._inductor.config

    return hasattr(torch._inductor.config, "deterministic")
