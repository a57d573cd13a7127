"""Lanes: pieces of hardware that work on their own, and the fences between them.

A lane is one background thread that takes work in order. On a CUDA device a copy lane's work is
enqueued on a stream of its own and its fence holds a CUDA event; on the CPU device, and for host
cores, the thread does the work itself. Both obey the same fences, so that every ordering bug of
the GPU engine can be provoked on a CPU.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from outcore.errors import LaneError, LaneStoreError, StoreError
from outcore.stream.recording import recorded


def _new_event() -> torch.cuda.Event:
    # Blocking: a thread that waits sleeps. By default it spins, on a core that AdamW needs.
    return torch.cuda.Event(blocking=True)


class Fence:
    """The done-mark of one piece of work.

    *Issued* means that the work was handed to its hardware; ``event``, if there is one, then says
    when it is done. Without an event, issued is done.
    """

    __slots__ = ("_issued", "error", "event")

    def __init__(self) -> None:
        self._issued = threading.Event()
        self.event: torch.cuda.Event | None = None
        self.error: BaseException | None = None

    @classmethod
    def after_compute(cls, device: torch.device) -> Fence:
        """Return the fence of all work that the calling thread has launched on ``device``."""
        fence = cls()
        if device.type == "cuda":
            fence.event = _new_event()
            fence.event.record(torch.cuda.current_stream(device))
        fence._issued.set()
        return fence

    def mark_issued(self) -> None:
        self._issued.set()

    @property
    def is_issued(self) -> bool:
        return self._issued.is_set()

    @property
    def is_done(self) -> bool:
        """Whether the work succeeded and is over; a failure stays to be raised where it matters."""
        done = self._issued.is_set() and self.error is None
        return done and (self.event is None or self.event.query())

    def block(self) -> None:
        """Make the calling thread wait until the work is done."""
        self._wait_issued()
        if self.event is not None:
            self.event.synchronize()

    def before_compute(self) -> None:
        """Make what the calling thread launches next on its current stream wait for the work."""
        self._wait_issued()
        if self.event is not None:
            # The event's own device: the calling thread's current device may be another one.
            self.event.wait(torch.cuda.current_stream(self.event.device))

    def _wait_issued(self) -> None:
        self._issued.wait()
        if self.error is not None:
            first = _first(self.error)
            raise _told(first) from first


def _first(error: BaseException) -> BaseException:
    """Return what failed first, where ``error`` is of work that waited for other work."""
    while isinstance(error, LaneError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _told(first: BaseException) -> LaneError:
    """Return what each who waits gets: raised itself, ``first`` would keep their frames."""
    what = f"background work failed: {str(first) or type(first).__name__}"  # Ctrl-C has no text
    if isinstance(first, StoreError):
        return LaneStoreError(what, path=first.path, offset=first.offset)
    return LaneError(what)


class _Work(NamedTuple):
    """What a lane is to do."""

    work: Callable[[], None]
    after: Sequence[Fence]
    first: Callable[[], object] | None
    fence: Fence
    label: str


class Lane:
    """A thread that carries out work in the order of submission."""

    def __init__(
        self, name: str, device: torch.device | None = None, *, hardware: str = "host cores"
    ) -> None:
        """``device``: where work is enqueued on a stream of this lane; None for host cores.

        ``hardware``: the lane of a plan that this one belongs to, see outcore.timeline.
        """
        self.name = name
        self.hardware = hardware
        self._device = device if device is not None and device.type == "cuda" else None
        self.stream = torch.cuda.Stream(self._device) if self._device is not None else None
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._closing = False
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()  # re-entrant: the collector may close a lane anywhere
        self._thread = threading.Thread(target=self._run, name=f"outcore-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Callable[[], None],
        *,
        after: Sequence[Fence] = (),
        first: Callable[[], object] | None = None,
        fence: Fence | None = None,
        label: str | None = None,
    ) -> Fence:
        """Queue ``work`` to run when the fences in ``after`` are passed; return its own fence.

        ``first`` waits for what has no fence: a recording does not count it as work.
        ``label``: what a recording calls it.
        """
        fence = fence if fence is not None else Fence()
        if os.getpid() != self._owner_pid:  # threads do not come along: nobody would do the work
            raise LaneError(
                f"lane {self.name} belongs to the process that this one forked from: use an "
                "offloaded model in the process that made it, or start this one with "
                'multiprocessing\'s "spawn" and offload the model there'
            )
        with self._lock:  # nothing may come behind the None of close()
            if self._closing:
                raise LaneError(f"lane {self.name} is closed")
            self._queue.put(_Work(work, tuple(after), first, fence, label or self.name))
        return fence

    def stop(self) -> None:
        """Drop queued work; the thread ends after the piece in hand."""
        with self._lock:
            self._closing = True
            self._queue.put(None)

    def close(self) -> None:
        """Drop queued work, finish the piece in hand, and end the thread."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        if self.stream is not None:
            # Its copies must land before anyone frees their memory; after a CUDA error the rest
            # must still close.
            with contextlib.suppress(RuntimeError):
                self.stream.synchronize()

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        on_stream = torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()
        with torch.no_grad(), on_stream:
            while (item := self._queue.get()) is not None:
                fence = item.fence
                if self._closing:
                    fence.error = LaneError(f"lane {self.name} was closed")
                else:
                    self._carry_out(item)
                    if fence.error is not None:
                        forget_locals(fence.error)
                fence.mark_issued()
                del item, fence  # hold no tensor while idle

    def _carry_out(self, item: _Work) -> None:
        fence = item.fence
        try:
            for earlier in item.after:
                if self.stream is not None:
                    earlier.before_compute()
                else:
                    earlier.block()
            if item.first is not None:
                item.first()
            injected_delay(self.stream)
            with recorded(self.hardware, item.label, self.stream):
                item.work()
            if self.stream is not None:
                fence.event = _new_event()
                fence.event.record(self.stream)
        except BaseException as error:
            fence.error = error


def forget_locals(error: BaseException) -> None:
    """Keep where ``error`` was raised, and nothing of what the functions there worked on.

    Threads refer to fences, and these to errors: a model that was dropped would never be collected.
    Functions that are still running keep what they have, and are to ``del`` it themselves. Closures
    keep what they close over.
    """
    cause: BaseException | None = error
    while cause is not None:  # a StoreError's is the system call's error, and that had the memory
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


class _Delays:
    source: random.Random | None = None
    max_s = 0.0


def injected_delay(stream: torch.cuda.Stream | None = None) -> None:
    """Wait for a random time if a test asked for it; on ``stream``, where there is one."""
    if _Delays.source is None:
        return
    delay_s = _Delays.source.uniform(0, _Delays.max_s)
    if stream is not None:
        torch.cuda._sleep(int(delay_s * 1.5e9))  # clock cycles, on the lane's own stream
    else:
        time.sleep(delay_s)


@contextlib.contextmanager
def injected_delays(max_s: float, seed: int) -> Iterator[None]:
    """Delay every copy and every update by 0 to ``max_s`` seconds, to provoke ordering bugs."""
    _Delays.source, _Delays.max_s = random.Random(seed), max_s
    try:
        yield
    finally:
        _Delays.source = None
