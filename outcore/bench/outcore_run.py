"""Outcore itself as a system of the benchmark table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import outcore
from outcore.bench.job import BenchJob, BenchResult
from outcore.bench.peers.causal_lm import bench_device, random_batch
from outcore.bench.peers.measure import forget_building, make_result, synchronize, time_steps
from outcore.kernels import host_isa
from outcore.planning.plan_json import plan_to_dict
from outcore.shapes import config_from_dict
from outcore.timeline import Span
from outcore.views.side_by_side import Measurement, busy_s, side_by_side

MOST_RESTS = 12  # of a lane, that are noted


def run(job: BenchJob) -> BenchResult:
    """Train with ``job.outcore_options``, the keyword arguments of ``outcore.offload``."""
    device = bench_device()
    start = time.perf_counter()
    clips = job.max_grad_norm is not None
    plan_options = {"clipping": clips, **(job.plan_options or {})}
    two_passes = clips and plan_options["clipping"] == "two-pass"
    options = {"weights": "host", "state": "host", **job.outcore_options}
    if job.plan_options is None:
        options["dtype"] = torch.bfloat16 if device.type == "cuda" else torch.float32
        options["micro_batch"] = job.micro_batch
    else:
        options = dict(job.outcore_options)
        options["plan"] = outcore.plan(
            job.config,
            tokens=job.tokens,
            seq_len=job.seq_len,
            dtype="bf16" if device.type == "cuda" else "fp32",
            micro_batch=job.micro_batch,
            **plan_options,
        )
    planning_s = time.perf_counter() - start
    torch.manual_seed(job.seed)
    model = outcore.from_config(config_from_dict(job.config), device=device, **options)
    try:
        return _measure(job, model, start, planning_s, two_passes)
    finally:
        # The process of a benchmark ends without the interpreter's clean-up; scratch files go here.
        outcore.engine_of(model).close()


def _measure(
    job: BenchJob, model: PreTrainedModel, start: float, planning_s: float, two_passes: bool
) -> BenchResult:
    clips = job.max_grad_norm is not None
    model.train()
    optimizer = outcore.AdamW(
        model,
        lr=job.lr,
        max_grad_norm=job.max_grad_norm,
        update_during_backward=not clips or two_passes,
    )
    building_s = time.perf_counter() - start
    ids, _ = random_batch(job, bench_device())
    losses: list[Tensor] = []

    def forward_and_backward() -> Tensor:
        # transformers shifts the labels itself
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def step() -> None:
        losses.append(optimizer.step(forward_and_backward))
        optimizer.zero_grad()

    def drain() -> None:
        optimizer.synchronize()
        synchronize()

    forget_building()
    with outcore.record(model) if job.records else contextlib.nullcontext() as recorded:
        times = time_steps(job, step, drain=drain)
    spans = () if recorded is None else recorded.measurement().spans
    engine = outcore.engine_of(model)
    notes: dict[str, Any] = {
        "optimizer_state": f"{engine.options.state_format.name}, "
        + " and ".join(sorted({unit.state_home for unit in engine.units})),
        "planning_s": planning_s,
        "fp32_master": True,
        "host_kernels": host_isa(),
        "clipping": clips,
        "passes": 2 if two_passes else 1,
        "building_s": building_s,
        "start_to_first_step_s": building_s + times.first_s,
        "blocks_kept": engine.policy.num_kept,
        "state_visits": engine.backend.num_visits,
        "elements_updated": engine.backend.num_updated,
        "host_update_s": engine.backend.host_busy_s,
        "fetches": engine.slots.num_fetches,
        "fetch_misses": engine.slots.num_misses,
        "device_budget_bytes": engine.device_ledger.budget_bytes,
        "host_arena_bytes": engine.host_ledger.peak_bytes,
        "device_purposes_bytes": engine.device_ledger.peaks(),
        "host_purposes_bytes": engine.host_ledger.peaks(),
        "losses": [float(loss) for loss in losses],
        "lanes": use_of_lanes(spans),
    }
    if engine.plan is not None:
        notes["plan"] = plan_to_dict(
            replace(engine.plan, prediction=replace(engine.plan.prediction, timeline=()))
        )
        notes["prediction"] = {
            row.what: {"predicted": row.predicted, "measured": row.measured}
            for row in side_by_side(
                engine.plan,
                Measurement(
                    step_s=times.headline_s,
                    spans=spans,
                    peak_bytes={tier.tier: tier.peak_bytes for tier in engine.report()},
                ),
            )
        }
    return make_result("outcore", job, times, float(losses[-1]), notes)


def use_of_lanes(spans: Sequence[Span]) -> dict[str, dict[str, Any]]:
    """Return how long each lane worked, on how much at a time, and when it rested the longest."""
    by_lane: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        by_lane.setdefault(span.lane, []).append(span)
    busy = busy_s(spans)
    return {
        lane: {
            "busy_s": busy[lane],
            "at_a_time": sum(span.end_s - span.start_s for span in pieces) / (busy[lane] or 1.0),
            "rests_s": _rests(pieces),
        }
        for lane, pieces in by_lane.items()
    }


def _rests(pieces: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the longest pauses between pieces of work, each by its start and length."""
    rests, end_s = [], 0.0
    for span in pieces:
        if span.start_s > end_s:
            rests.append((end_s, span.start_s - end_s))
        end_s = max(end_s, span.end_s)
    return sorted(sorted(rests, key=lambda rest: -rest[1])[:MOST_RESTS])
