"""Native PyTorch: parameters, gradients and optimizer state all in device memory.

The yardstick for speed, where a model fits: fp32 parameters, bf16 autocast, compiled blocks, fused
AdamW. `job.recompute` chooses between gradient checkpointing and keeping all activations.
"""

import torch
from torch import Tensor

from outcore.bench.job import BenchJob, BenchResult
from outcore.bench.peers.causal_lm import CausalLMLoss, bench_device, build_model, random_batch
from outcore.bench.peers.measure import forget_building, make_result, synchronize, time_steps
from outcore.shapes import config_from_dict

MICRO_BATCH = 4


def run(job: BenchJob) -> BenchResult:
    device = bench_device()
    on_gpu = device.type == "cuda"
    model = build_model(
        config_from_dict(job.config), device=device, dtype=torch.float32, seed=job.seed
    )
    train = CausalLMLoss(model, compiled=on_gpu, recompute=job.recompute)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=job.lr, fused=True)
    micro_batch = job.micro_batch_or(MICRO_BATCH)
    ids, targets = random_batch(job, device)
    batches = list(zip(ids.split(micro_batch), targets.split(micro_batch), strict=True))
    last_loss = torch.zeros((), device=device)

    def step() -> None:
        last_loss.zero_()
        for micro_ids, micro_targets in batches:
            # On a CPU without bf16 instructions autocast would be hundreds of times slower.
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
                loss: Tensor = train(micro_ids, micro_targets) / len(batches)
            torch.autograd.backward(loss)
            last_loss.add_(loss.detach())
        if job.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    forget_building()
    times = time_steps(job, step, after_step=synchronize)
    notes = {
        "optimizer_state": "device, fp32",
        "fp32_master": True,
        "clipping": job.max_grad_norm is not None,
        "recompute": job.recompute,
        "micro_batch": micro_batch,
        "compiled_blocks": on_gpu,
    }
    return make_result("native", job, times, last_loss.item(), notes)
