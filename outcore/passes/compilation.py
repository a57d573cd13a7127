"""How the engine has torch compile its functions: the same way for blocks and for losses."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from outcore.passes import read_back_barrier

_NUM_RECOMPILES = 64  # hybrid models have several structures, and each batch shape is its own
_SAVES_LITTLE = dict.fromkeys(
    (
        "ban_recompute_materialized_backward",
        "ban_recompute_used_far_apart",
        "ban_recompute_long_fusible_chains",
    ),
    False,
)
_OPTIONS: dict[str, Any] = {
    # To try several variants of an elementwise kernel that writes to its inputs, the compiler keeps
    # a copy of them in pinned memory: 1 GiB at 16,384 tokens of a 7B model, which stays.
    "triton.autotune_pointwise": False,
    # Reductions and padded products are not chosen by the clock: the same kernels in every process.
    "deterministic": True,
}


def compiled(function: Callable[..., Any], *, saves_little: bool = False) -> Callable[..., Any]:
    """Return ``function`` compiled for each shape that it is called with.

    ``saves_little``: for the backward, the compiler saves nothing that single elements of what it
    saves anyway can give: a gated product, what a norm hands on, what a dropout leaves. A
    Llama-like block keeps a third less, and writes that third once more in its backward.
    """
    import torch._dynamo  # takes a second: not before it is needed

    config = torch._dynamo.config
    limit = max(_NUM_RECOMPILES, config.recompile_limit)
    limits: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        limits["recompile_limit"] = limit  # settings are a thread's own there
    else:
        config.recompile_limit = limit
    options = dict(_OPTIONS)
    if not _has_deterministic_option():
        del options["deterministic"]
    backend = _Inductor(options, saves_little)
    return torch.compile(function, dynamic=False, backend=backend, **limits)


class _Inductor:
    """torch's own compiler, with options that ``torch.compile`` does not pass on to it."""

    def __init__(self, options: dict[str, Any], saves_little: bool) -> None:
        self._options = options
        self._saves_little = saves_little

    def __call__(self, graph: Any, inputs: Any) -> Any:
        import torch._functorch.config as partitioner
        from torch._inductor.compile_fx import compile_fx

        # What is to be saved is decided here; the backward itself is compiled when it first runs.
        saves = partitioner.patch(_SAVES_LITTLE if self._saves_little else {})
        with read_back_barrier.installed(), saves:
            return compile_fx(
                graph, inputs, inner_compile=_compile_kernels, config_patches=self._options
            )


def _compile_kernels(*args: Any, **kwargs: Any) -> Any:
    """Compile a forward or a backward, in whichever thread first runs it."""
    from torch._inductor import compile_fx

    with read_back_barrier.installed():
        return compile_fx.compile_fx_inner(*args, **kwargs)


def start_compiler() -> None:
    """Start the process that compiles kernels: it takes seconds, in which weights are read.

    torch starts it at the first compilation, and compiles one kernel after the other until it is
    there. Its own children wait until then: torch 2.11 may never end them where the program ends
    as they start, after an error perhaps, and waits five minutes.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch.utils._triton import has_triton_package

    if has_triton_package() and os.environ.get("TORCH_WARM_POOL", "1") == "1":
        AsyncCompile.warm_pool()


def _has_deterministic_option() -> bool:
    """torch 2.9 has not, and asks the clock."""
    import torch._inductor.config

    return hasattr(torch._inductor.config, "deterministic")
