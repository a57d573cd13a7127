"""DeepSpeed ZeRO-2 with the optimizer on the host (ZeRO-Offload).

bf16 weights on the device, fp32 master and moments on the host, DeepSpeedCPUAdam, global clipping.
The whole batch goes in at once: with gradient accumulation DeepSpeed sends every micro-batch's
gradients to the host and adds them up there.
"""

import importlib.metadata
import os
import socket
from typing import Any

import torch
from torch import Tensor

from outcore.bench.job import BenchJob, BenchResult
from outcore.bench.peers.causal_lm import CausalLMLoss, bench_device, build_model, random_batch
from outcore.bench.peers.measure import forget_building, make_result, synchronize, time_steps
from outcore.shapes import config_from_dict


def run(job: BenchJob) -> BenchResult:
    become_world_of_one()
    import deepspeed

    device = bench_device()
    on_gpu = device.type == "cuda"
    model = build_model(
        config_from_dict(job.config), device=device, dtype=torch.bfloat16, seed=job.seed
    )
    train = CausalLMLoss(model, compiled=on_gpu, recompute=job.recompute)
    micro_batch = job.micro_batch_or(job.sequences)
    engine, *_ = deepspeed.initialize(
        model=train,
        model_parameters=list(train.parameters()),
        config=zero2_config(job, micro_batch),
    )
    ids, targets = random_batch(job, device)
    batches = list(zip(ids.split(micro_batch), targets.split(micro_batch), strict=True))
    last_loss = torch.zeros((), device=device)

    def step() -> None:
        last_loss.zero_()
        for micro_ids, micro_targets in batches:
            loss: Tensor = engine(micro_ids, micro_targets)
            # DeepSpeed divides by the number of micro-batches, and updates after the last one.
            engine.backward(loss)
            engine.step()
            last_loss.add_(loss.detach() / len(batches))

    forget_building()
    times = time_steps(job, step, after_step=synchronize)
    notes = {
        "version": importlib.metadata.version("deepspeed"),
        "optimizer_state": "host, fp32",
        "fp32_master": True,
        "clipping": job.max_grad_norm is not None,
        "recompute": job.recompute,
        "micro_batch": micro_batch,
        "compiled_blocks": on_gpu,
    }
    return make_result("deepspeed", job, times, last_loss.item(), notes)


def zero2_config(job: BenchJob, micro_batch: int) -> dict[str, Any]:
    """DeepSpeed's own configuration, in its words."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": job.sequences // micro_batch,
        # DeepSpeed's word for no clipping is 0.
        "gradient_clipping": job.max_grad_norm or 0.0,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": job.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "steps_per_print": 1_000_000,
        "wall_clock_breakdown": False,
    }


def become_world_of_one() -> None:
    """What a launcher would set: without it DeepSpeed goes looking for MPI."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        os.environ.setdefault(name, value)
