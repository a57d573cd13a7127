"""Outcore's own warnings as lines of a command's output: who trains has no use for a line of code.

Those of other libraries are shown as Python shows them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_PACKAGE = Path(__file__).parents[1]


@contextlib.contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Give the words of warnings that this package causes to ``tell``."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if Path(filename).is_relative_to(_PACKAGE):
            tell(f"warning: {message}")
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
