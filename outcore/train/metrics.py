"""Figures of a run as it goes: lines of JSON, and TensorBoard where it is installed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"
_TENSORBOARD_FOLDER = "tensorboard"
_FIRST_BYTES = tuple(f'{{"kind": "{kind}", "step": '.encode() for kind in ("train", "eval"))
_THREAD_ENDS_S = 1.0  # of what is an instant


class Metrics:
    """Appends what it is told; what an earlier run wrote of later steps is dropped first."""

    def __init__(
        self,
        output: Path,
        *,
        first_step: int,
        tensorboard: bool | None,
        evaluates_again: bool = False,
        tell: Callable[[str], None] = warnings.warn,
    ) -> None:
        """``first_step``: the step that comes first now; lines of it and later are dropped.

        evaluates_again: so is the evaluation after the step before it.
        tell: is told of lines that are damaged, and, once in a row, of those that the disk has no
        room for.
        """
        self._path = output / FILE_NAME
        kept, dropped = _drop_later(self._path, first_step, evaluates_again, tell)
        # TensorBoard has it already, and would show it twice.
        self._drawn = [_identity(line) for line in dropped if line["step"] < first_step]
        self._evaluated = {line["step"] for line in kept if line["kind"] == "eval"}
        self._file = self._path.open("ab", buffering=0)
        self._tell = tell
        self._is_failing = False
        with contextlib.ExitStack() as opened:
            opened.enter_context(_board_thread_told_once())
            self._board = _board(output, tensorboard, first_step)
            self._until_closed = opened.pop_all()

    def add(self, kind: str, step: int, held_out: str | None = None, /, **values: float) -> None:
        """Write one line; ``kind`` is "train" or "eval".

        held_out: which data an evaluation is of; TensorBoard has no place for it.
        """
        line: dict[str, Any] = {"kind": kind, "step": step}
        if held_out is not None:
            line["held_out"] = held_out
        line |= {k: _plain(v) for k, v in values.items()}
        self._append(f"{json.dumps(line)}\n".encode())
        if _identity(line) not in self._drawn:
            self._draw(kind, step, values)

    def _append(self, line: bytes) -> None:
        """Write a line or nothing of it: what was trained is worth more than a line about it."""
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # half a line would hide all that follow
            if not self._is_failing:
                self._tell(f"{self._path}: {error.strerror}; lines are missing from here on")
            self._is_failing = True
        else:
            self._is_failing = False

    def _draw(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Give TensorBoard its figures, until it cannot write them: the lines have them too."""
        if self._board is None:
            return
        try:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
        except Exception as error:  # what its thread met; every later call would raise it again
            self._board = None
            self._tell_of_board(error)

    def _tell_of_board(self, error: Exception) -> None:
        self._tell(f"TensorBoard gets no more figures of this run: {error}")

    def is_evaluated(self, step: int) -> bool:
        """Whether an earlier process evaluated the model after this step."""
        return step in self._evaluated

    def close(self) -> None:
        self._file.close()
        with self._until_closed:
            if self._board is not None:
                try:
                    self._board.close()
                except OSError as error:  # at the end of a run, of which all is saved
                    self._tell_of_board(error)


def is_of_a_run(path: Path) -> bool:
    """Whether the file begins as ``Metrics`` writes it; an empty one is nobody's, and may go."""
    with path.open("rb") as file:
        start = file.read(1 << 16).lstrip()
    return not start or any(start.startswith(ours[: len(start)]) for ours in _FIRST_BYTES)


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, without those that are damaged, cut off, or foreign."""
    return _read(output / FILE_NAME)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines, and how many are none; a last one that a kill cut off does not count."""
    if not path.is_file():
        return [], 0
    *texts, cut_off = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = [_line(text) for text in texts if text.strip()]
    num_bad = lines.count(None)
    lines.append(_line(cut_off))
    return [line for line in lines if line is not None], num_bad


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(line, dict) and type(line.get("step")) is int and "kind" in line
    return line if is_ours else None


def _drop_later(
    path: Path, first_step: int, evaluates_again: bool, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines that stay, and the others."""
    if not path.is_file():
        return [], []
    end_of_evaluations = first_step - 1 if evaluates_again else first_step
    lines, num_bad = _read(path)
    if num_bad:
        tell(f"{path}: lines that are damaged, or not of a run, are left out: {num_bad}")
    kept: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for line in lines:
        stays = line["step"] < (end_of_evaluations if line["kind"] == "eval" else first_step)
        (kept if stays else dropped).append(line)
    beside = path.with_suffix(".new")
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(beside, path)
    return kept, dropped


def _identity(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["kind"], line["step"], line.get("held_out")


def check_tensorboard(asked: bool | None) -> None:
    """Raise ValueError where TensorBoard is asked for and not there."""
    if asked:
        _writer_class()


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "TensorBoard is not installed: pip install tensorboard, or leave --tensorboard out"
        ) from None
    return SummaryWriter


def _board(output: Path, asked: bool | None, first_step: int) -> Any:
    if asked is False or (asked is None and find_spec("tensorboard") is None):
        return None
    try:
        writer = _writer_class()
    except ValueError:
        if asked:
            raise
        return None  # there, but it does not work: nobody asked for it
    # What an interrupted run logged after its checkpoint is hidden by TensorBoard itself.
    return writer(str(output / _TENSORBOARD_FOLDER), purge_step=first_step or None)


@contextlib.contextmanager
def _board_thread_told_once() -> Iterator[None]:
    """Print no traceback of the thread that writes for TensorBoard: what it met is raised again by
    the next call of its writer, and told there.
    """
    before = threading.excepthook

    def failed(thread_failed: threading.ExceptHookArgs) -> None:
        if not _is_of_board(thread_failed.thread):
            before(thread_failed)

    threading.excepthook = failed
    try:
        yield
    finally:
        for thread in filter(_is_of_board, threading.enumerate()):
            thread.join(_THREAD_ENDS_S)  # it has said what it met, and may not have ended yet
        if threading.excepthook is failed:
            threading.excepthook = before


def _is_of_board(thread: threading.Thread | None) -> bool:
    return type(thread).__module__.startswith("tensorboard.")


def _plain(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value == value and abs(value) != float("inf") else None
