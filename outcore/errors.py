"""The errors that Outcore raises for what the environment or the model cannot give.

What a caller passed wrongly is a plain ``ValueError``; these are for everything else.
"""

from __future__ import annotations

from os import PathLike


class OutcoreError(Exception):
    """Base class of Outcore's own errors."""


class OutOfBudget(OutcoreError, MemoryError):
    """A tier has no room for what was asked; the message has the numbers and the remedy."""


class UnsupportedModel(OutcoreError, ValueError):
    """The model has a structure that cannot be offloaded; nothing was changed."""


class NonFiniteGradient(OutcoreError, ArithmeticError):
    """A gradient holds an infinity or a NaN; names the blocks where it was found."""


class LaneError(OutcoreError, RuntimeError):
    """Work on a background lane failed; the original error is the cause."""


class StoreError(OutcoreError, OSError):
    """A store could not read, write or map its bytes; where it is known, ``path`` and ``offset``.

    The message names both, with what to do about it.
    """

    def __init__(
        self, message: str, *, path: str | PathLike[str] | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset


class LaneStoreError(StoreError, LaneError):
    """A ``StoreError`` met on a background lane, for whoever waits there; that one is the cause."""


class DoesNotFit(OutOfBudget):
    """No plan fits the budgets; says what is missing, and the nearest changes that would fit."""

    def __init__(
        self,
        message: str,
        *,
        missing_bytes: dict[str, int],
        changes: tuple[object, ...] = (),
        command_line: str | None = None,
    ) -> None:
        super().__init__(message)
        self.command_line = command_line or message  # the message with options for arguments
        self.missing_bytes = missing_bytes  # by tier
        self.changes = changes  # outcore.planning.refusal.Change, the nearest first; each was tried


class BadRow(OutcoreError, ValueError):
    """A row of training data cannot be used; ``path``, ``line`` (from 1) and ``why`` say it all.

    In a table, ``line`` is the number of the row.
    """

    def __init__(self, path: str | PathLike[str], line: int, why: str) -> None:
        super().__init__(path, line, why)  # all three, so that it survives a way between processes
        self.path = path
        self.line = line
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.why}"


class UnknownFormat(BadRow):
    """The first row has the fields of no format: to leave rows out does not help."""


class UnsupportedTemplate(OutcoreError, ValueError):
    """The tokenizer's chat template does not tell which tokens are answers."""


class MissingLibrary(OutcoreError, ImportError):
    """A library that only this kind of file needs is not installed; names the pip command."""
