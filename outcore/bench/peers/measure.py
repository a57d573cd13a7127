"""The stopwatch and the scales: how a peer's steps and memory are measured.

Owns the rules that make rows comparable. A step is forward, backward, clipping and update; warm-up
steps are not counted; the headline is the median of the timed ones. A system whose step returns
while it still works is counted by the mean instead, see `StepTimes.headline_s`.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.bench.flops import step_flops
from outcore.bench.job import BenchJob, BenchResult

__all__ = ["StepTimes", "forget_building", "make_result", "synchronize", "time_steps"]

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The wall times of one measurement."""

    first_s: float
    steps_s: list[float]
    drain_s: float | None = None
    """How long the work went on that the last step left behind; None where a step leaves none."""

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.steps_s)

    @property
    def mean_drained_s(self) -> float:
        """The mean with the leftover of the last step on top: an upper bound."""
        return self.mean_s + (self.drain_s or 0.0) / len(self.steps_s)

    @property
    def headline_s(self) -> float:
        """The median; for a system that works on in the background, the mean.

        Such a system enters the timed steps with the leftover of the last warm-up step and ends
        them with one of its own, so that the walls together hold exactly as many updates as steps.
        One wall alone may not hold its own, which is why the median would not do. This is fair as
        long as the leftover cannot grow: the system must wait in each step for the one before.
        """
        return statistics.median(self.steps_s) if self.drain_s is None else self.mean_s


def time_steps(
    job: BenchJob,
    step: Callable[[], object],
    *,
    after_step: Callable[[], None] | None = None,
    drain: Callable[[], None] | None = None,
) -> StepTimes:
    """Runs the warm-up and the timed steps.

    `after_step` ends each wall, with a device synchronisation. A system that works on in the
    background has none; instead `drain` waits for all that its last step left behind.
    """
    calls = [step] if after_step is None else [step, after_step]
    warmup_s = [_timed(*calls) for _ in range(job.warmup_steps)]
    steps_s = [_timed(*calls) for _ in range(job.steps)]
    drain_s = None if drain is None else _timed(drain)
    return StepTimes(first_s=warmup_s[0], steps_s=steps_s, drain_s=drain_s)


def _timed(*calls: Callable[[], object]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def synchronize() -> None:
    """Waits for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_building() -> None:
    """Starts the memory peaks afresh, so that building the model is not part of them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def make_result(
    name: str, job: BenchJob, times: StepTimes, loss: float, notes: dict[str, Any]
) -> BenchResult:
    """The row of a peer that ran through."""
    has_device = torch.cuda.is_available()
    step_s = times.headline_s
    return BenchResult(
        name=name,
        step_s=step_s,
        all_step_s=times.steps_s,
        first_step_s=times.first_s,
        tokens_per_s=job.tokens / step_s,
        tflops=step_flops(job.config, job.sequences, job.seq_len) / step_s / 1e12,
        device_peak_bytes=torch.cuda.max_memory_allocated() if has_device else 0,
        device_reserved_bytes=torch.cuda.max_memory_reserved() if has_device else 0,
        host_rss_bytes=_peak_rss_bytes(),
        loss=loss,
        notes={
            **notes,
            "counted_by": "median" if times.drain_s is None else "mean",
            "mean_step_s": times.mean_s,
            "drain_s": times.drain_s,
            "mean_drained_step_s": times.mean_drained_s,
            "device": torch.cuda.get_device_name() if has_device else "cpu",
            "torch": torch.__version__,
        },
    )


def _peak_rss_bytes() -> int:
    """VmHWM: the most resident memory that this process ever had."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
