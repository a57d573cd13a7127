"""Recording what each lane does when, for as long as somebody asks for it.

On a CUDA stream a piece of work lies between two events that are timed by the device; elsewhere it
is timed by the thread that does it. Both are told in seconds since the recording began.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch

from outcore.timeline import Span


class Recording:
    """The spans of everything that ran while it was active."""

    def __init__(self, device: torch.device) -> None:
        self.steps_s: list[float] = []  # the ends of optimizer steps, as the caller sees them
        self._lock = threading.Lock()
        self._on_host: list[Span] = []
        self._on_device: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start_s = time.perf_counter()
        self._start_event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # The clocks of host and device meet here.
            torch.cuda.synchronize(device)
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._start_event.record(torch.cuda.current_stream(device))
            self._start_s = time.perf_counter()

    @contextlib.contextmanager
    def work(self, lane: str, name: str, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Record what is done, or launched on ``stream``, inside."""
        if stream is None:
            start_s = time.perf_counter()
            yield
            end_s = time.perf_counter()
            span = Span(
                lane=lane,
                name=name,
                start_s=start_s - self._start_s,
                end_s=end_s - self._start_s,
            )
            with self._lock:
                self._on_host.append(span)
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record(stream)
        yield
        events[1].record(stream)
        with self._lock:
            self._on_device.append((lane, name, *events))

    def step_ended(self) -> None:
        self.steps_s.append(time.perf_counter() - self._start_s)

    def spans(self) -> list[Span]:
        """Return what was recorded, in order; waits for the device."""
        with self._lock:
            spans, on_device = list(self._on_host), list(self._on_device)
        for lane, name, start, end in on_device:
            assert self._start_event is not None
            end.synchronize()
            start_s = self._start_event.elapsed_time(start) / 1e3
            end_s = self._start_event.elapsed_time(end) / 1e3
            spans.append(Span(lane=lane, name=name, start_s=start_s, end_s=end_s))
        return sorted(spans, key=lambda span: span.start_s)


class _Active:
    recording: Recording | None = None


@contextlib.contextmanager
def recording(device: torch.device) -> Iterator[Recording]:
    """Record every lane of this process while the context is open."""
    if _Active.recording is not None:
        raise RuntimeError("a recording is running already")
    _Active.recording = Recording(device)
    try:
        yield _Active.recording
    finally:
        _Active.recording = None


@contextlib.contextmanager
def recorded(lane: str, name: str, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Do what is inside; record it if anybody has asked."""
    active = _Active.recording
    if active is None:
        yield
        return
    with active.work(lane, name, stream):
        yield


def step_ended() -> None:
    """Say that an optimizer step was handed over."""
    if _Active.recording is not None:
        _Active.recording.step_ended()


def compute_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that the calling thread launches on; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
