"""Outcore itself as a system of the benchmark table."""

from __future__ import annotations

import time

import torch
from torch import Tensor

import outcore
from outcore.bench.job import BenchJob, BenchResult
from outcore.bench.peers.causal_lm import bench_device, random_batch
from outcore.bench.peers.measure import forget_building, make_result, synchronize, time_steps
from outcore.shapes import config_from_dict


def run(job: BenchJob) -> BenchResult:
    """Train with ``job.outcore_options``, the keyword arguments of ``outcore.offload``."""
    device = bench_device()
    start = time.perf_counter()
    torch.manual_seed(job.seed)
    model = outcore.from_config(
        config_from_dict(job.config),
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        micro_batch=job.micro_batch,
        **job.outcore_options,
    )
    model.train()
    clips = job.max_grad_norm is not None
    optimizer = outcore.AdamW(
        model, lr=job.lr, max_grad_norm=job.max_grad_norm, update_during_backward=not clips
    )
    building_s = time.perf_counter() - start
    ids, _ = random_batch(job, device)
    losses: list[Tensor] = []

    def step() -> None:
        # transformers shifts the labels itself
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    def drain() -> None:
        optimizer.synchronize()
        synchronize()

    forget_building()
    times = time_steps(job, step, drain=drain)
    engine = outcore.engine_of(model)
    notes = {
        "optimizer_state": f"{engine.options.state}, fp32",
        "fp32_master": True,
        "clipping": clips,
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
    }
    return make_result("outcore", job, times, float(losses[-1]), notes)
