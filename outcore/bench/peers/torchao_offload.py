"""torchao's CPUOffloadOptimizer: bf16 weights on the device, state and update on the host.

The state is kept in the parameters' own type, so there is no fp32 master copy, and gradients leave
one by one, so there is no global norm to clip by. The whole batch goes in at once: each further
micro-batch would send all gradients to the host again.
"""

import importlib.metadata

import torch
from torch import Tensor

from outcore.bench.job import BenchJob, BenchResult
from outcore.bench.peers.causal_lm import CausalLMLoss, bench_device, build_model, random_batch
from outcore.bench.peers.measure import forget_building, make_result, synchronize, time_steps
from outcore.shapes import config_from_dict


def run(job: BenchJob) -> BenchResult:
    from torchao.optim import CPUOffloadOptimizer

    device = bench_device()
    if device.type != "cuda":
        raise RuntimeError("torchao's CPUOffloadOptimizer needs a CUDA device")
    model = build_model(
        config_from_dict(job.config), device=device, dtype=torch.bfloat16, seed=job.seed
    )
    train = CausalLMLoss(model, compiled=True, recompute=job.recompute)
    micro_batch = job.micro_batch_or(job.sequences)
    # Freeing each gradient once it is on the host is valid only without accumulation.
    offload_gradients = micro_batch == job.sequences
    optimizer = CPUOffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=offload_gradients,
        fused=True,
        lr=job.lr,
    )
    ids, targets = random_batch(job, device)
    batches = list(zip(ids.split(micro_batch), targets.split(micro_batch), strict=True))
    last_loss = torch.zeros((), device=device)

    def step() -> None:
        last_loss.zero_()
        for micro_ids, micro_targets in batches:
            loss: Tensor = train(micro_ids, micro_targets) / len(batches)
            torch.autograd.backward(loss)
            last_loss.add_(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    forget_building()
    times = time_steps(job, step, after_step=synchronize)
    notes = {
        "version": importlib.metadata.version("torchao"),
        "optimizer_state": "host, bf16",
        "fp32_master": False,
        "clipping": False,
        "recompute": job.recompute,
        "micro_batch": micro_batch,
        "offload_gradients": offload_gradients,
        "compiled_blocks": True,
    }
    return make_result("torchao", job, times, last_loss.item(), notes)
