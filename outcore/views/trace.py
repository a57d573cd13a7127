"""Spans as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process for what was measured, one for what was predicted, a thread for each lane. Times count
from the first span of each, so that both begin at zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outcore.planning.plan import LANES, Span

MEASURED = "measured"
PREDICTED = "predicted"
_US = 1e6  # a trace counts in microseconds


def write_trace(spans: Sequence[Span], path: str | Path, *, predicted: Sequence[Span] = ()) -> None:
    """Write the measured spans, and beside them the predicted ones if there are any."""
    text = json.dumps(trace(spans, predicted=predicted))
    Path(path).write_text(text, encoding="utf-8")


def trace(spans: Sequence[Span], *, predicted: Sequence[Span] = ()) -> dict[str, Any]:
    """Return the trace as plain values."""
    events = list(_events(spans, MEASURED, pid=1))
    if predicted:
        events += _events(predicted, PREDICTED, pid=2)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans_from_trace(data: Mapping[str, Any], process: str = MEASURED) -> tuple[Span, ...]:
    """Return one process's spans from a trace that ``trace`` made, to rounding of the times."""
    events = data["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    pids = {e["pid"] for e in names if e["name"] == "process_name" and e["args"]["name"] == process}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    return tuple(
        Span(
            lane=lanes[event["pid"], event["tid"]],
            name=event["name"],
            start_s=event["ts"] / _US,
            end_s=(event["ts"] + event["dur"]) / _US,
        )
        for event in events
        if event["ph"] == "X" and event["pid"] in pids
    )


def from_zero(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with the first one's start as time zero."""
    zero_s = min((span.start_s for span in spans), default=0.0)
    return [
        Span(
            lane=span.lane,
            name=span.name,
            start_s=span.start_s - zero_s,
            end_s=span.end_s - zero_s,
        )
        for span in spans
    ]


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes that occur, the known ones first and in their usual order."""
    found = dict.fromkeys(span.lane for span in spans)
    return [lane for lane in LANES if lane in found] + [lane for lane in found if lane not in LANES]


def _events(spans: Sequence[Span], process: str, *, pid: int) -> Iterable[dict[str, Any]]:
    yield _name("process_name", process, pid=pid, tid=0)
    tids = {lane: tid for tid, lane in enumerate(lanes_of(spans), start=1)}
    for lane, tid in tids.items():
        yield _name("thread_name", lane, pid=pid, tid=tid)
        order = {"sort_index": tid}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": order}
    for span in from_zero(spans):
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": pid,
            "tid": tids[span.lane],
            "ts": span.start_s * _US,
            "dur": (span.end_s - span.start_s) * _US,
        }


def _name(what: str, name: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
