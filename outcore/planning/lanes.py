"""The lanes of a simulated step: when each is free, how long it worked, who waited for whom."""

from __future__ import annotations

from outcore.planning.plan import LANES, Span

COMPUTE, TO_DEVICE, TO_HOST, HOST, DISK_READ, DISK_WRITE = LANES


class LaneClock:
    """Each lane works off its pieces one after another, each as early as it may start."""

    def __init__(self, *, records: bool) -> None:
        self.free = dict.fromkeys(LANES, 0.0)
        self.busy = dict.fromkeys(LANES, 0.0)
        self.waits = dict.fromkeys(LANES, 0.0)  # of compute, by the lane that it waited for
        self.spans: list[Span] = []
        self._records = records

    def run(self, lane: str, duration: float, after: float, name: str) -> float:
        """Play one piece, not before ``after``; return its end."""
        free = self.free[lane]
        start = after if after > free else free
        end = start + duration
        self.free[lane] = end
        self.busy[lane] += duration
        if self._records and duration > 0:
            self.spans.append(Span(lane=lane, name=name, start_s=start, end_s=end))
        return end

    def compute(self, duration: float, after: float, awaited: str, name: str) -> float:
        """Play one piece of compute; a wait counts against the ``awaited`` lane."""
        wait = after - self.free[COMPUTE]
        if wait > 0:
            self.waits[awaited] += wait
        return self.run(COMPUTE, duration, after, name)

    def begin_step(self) -> None:
        self.busy = dict.fromkeys(LANES, 0.0)
        self.waits = dict.fromkeys(LANES, 0.0)

    def spans_between(self, start: float, end: float) -> tuple[Span, ...]:
        """Return what ran in a window, cut to it and counted from its start."""
        return tuple(
            Span(
                lane=span.lane,
                name=span.name,
                start_s=max(span.start_s, start) - start,
                end_s=min(span.end_s, end) - start,
            )
            for span in sorted(self.spans, key=lambda span: span.start_s)
            if span.end_s > start and span.start_s < end
        )
