"""Who may touch a record now: any number of readers, or one writer; in the end nobody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator


class RecordAccess:
    """Readers of a record wait for a write in flight, and a writer for all of them.

    Different records never wait for each other. A reader that overlapped a write would find a
    checksum that is neither the old one nor the new.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers: dict[int, int] = {}
        self._writing: set[int] = set()
        self.is_closed = False  # whoever finds this, once let in, must leave

    def close(self) -> None:
        """Wait until nobody is at work."""
        with self._changed:
            self.is_closed = True
            self._changed.wait_for(
                lambda: not self._writing and not any(self._num_readers.values())
            )

    @contextlib.contextmanager
    def reading(self, indices: Iterable[int]) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for index in sorted(set(indices)):  # in one order for all, or two could wait in a ring
                held.enter_context(self._reading(index))
            yield

    @contextlib.contextmanager
    def writing(self, indices: Iterable[int]) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for index in sorted(set(indices)):
                held.enter_context(self._writing_to(index))
            yield

    @contextlib.contextmanager
    def _reading(self, index: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: index not in self._writing)
            self._num_readers[index] = self._num_readers.get(index, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers[index] -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _writing_to(self, index: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(
                lambda: index not in self._writing and not self._num_readers.get(index)
            )
            self._writing.add(index)
        try:
            yield
        finally:
            with self._changed:
                self._writing.discard(index)
                self._changed.notify_all()
