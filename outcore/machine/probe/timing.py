"""How long one call takes, sustained, on a CPU or on a CUDA device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_MOST_CALLS = 5000


def seconds_per_call(call: Callable[[], object], *, device: torch.device, seconds: float) -> float:
    """Return the time of one call, seen over about ``seconds``, after warming up.

    On CUDA the mean of calls that queue up back to back, timed by events: clocks that sink under
    load count, launching does not. On a CPU the median: what else runs there comes in bursts.
    """
    timed = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    call()
    once = max(timed(call, 2, seconds), 1e-7)
    num_calls = max(3, min(_MOST_CALLS, round(seconds / once)))
    return max(timed(call, num_calls, seconds), 1e-9)


def _cpu_seconds(call: Callable[[], object], num_calls: int, seconds: float) -> float:
    times: list[float] = []
    # A machine that is busy with other things may take far longer than the first calls promised.
    while len(times) < num_calls and (len(times) < 3 or sum(times) < 2 * seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _cuda_seconds(call: Callable[[], object], num_calls: int, seconds: float) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / num_calls
