"""Deterministic algorithms, where a GPU has a choice.

By default the attention's backward adds in whatever order its threads come. What the compiler
chooses is settled already (``outcore/passes/compilation.py``), except by torch 2.9.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


def ask_cublas_for_it() -> None:
    """Give matrix products workspaces of their own. Read when CUDA starts: call this before."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use them within; memory that is not written yet is left as it is, which takes no time."""
    ask_cublas_for_it()
    import torch
    import torch.utils.deterministic

    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)
        settings.fill_uninitialized_memory = filled
