"""Host AdamW: nanoseconds per parameter, against torch's fused one with the casts that it needs.

Both sides take a bf16 gradient and leave a bf16 weight. Ours reads and writes them in one pass over
the split state (12 bytes a parameter). torch's keeps an fp32 weight and moments: the gradient is
cast to fp32 before the step and the weight to bf16 after it. Both use the same threads of the same
OpenMP runtime, in one process, and take turns, so that a noisy machine is noisy for both. The
compact state (5 bytes a parameter) and the minimal one (4 bytes) are measured beside the split one.

    python benchmarks/host_adamw.py --json host_adamw.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from outcore.kernels import (
    AdamWScalars,
    adamw_,
    adamw_compact_,
    split_master,
    split_master24,
    zero_moments,
)
from outcore.kernels.library import set_host_isa

ISAS = ("avx512", "avx2", "neon", "scalar")
LR, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
MI = 1 << 20


def available_isas() -> list[str]:
    names = []
    for name in ISAS:
        try:
            set_host_isa(name)
        except ValueError:
            continue
        names.append(name)
    return names


def scalars_of_a_step() -> AdamWScalars:
    return AdamWScalars.of(
        lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, step=10
    )


def split_step(isa: str, grad: torch.Tensor, num_threads: int) -> Callable[[], None]:
    weight, remainder = split_master(torch.randn(grad.numel()) * 0.02)
    exp_avg, exp_avg_sq = torch.zeros(grad.numel()), torch.zeros(grad.numel())
    scalars = scalars_of_a_step()

    def step() -> None:
        set_host_isa(isa)
        adamw_(
            weight=weight,
            remainder=remainder,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            grad=grad,
            scalars=scalars,
            threads=num_threads,
        )

    return step


def compact_step(
    isa: str, grad: torch.Tensor, num_threads: int, *, is_minimal: bool
) -> Callable[[], None]:
    weight, remainder = split_master24(torch.randn(grad.numel()) * 0.02)
    moments = zero_moments(grad.numel())
    scalars = scalars_of_a_step()

    def step() -> None:
        set_host_isa(isa)
        adamw_compact_(
            weight=weight,
            remainder=None if is_minimal else remainder,
            **moments._asdict(),
            grad=grad,
            scalars=scalars,
            seed=0,
            step=10,
            threads=num_threads,
        )

    return step


def torch_step(grad: torch.Tensor) -> Callable[[], None]:
    master = torch.nn.Parameter(torch.randn(grad.numel()) * 0.02)
    master.grad = torch.zeros_like(master)
    weight = master.detach().bfloat16()
    optimizer = torch.optim.AdamW(
        [master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        weight.copy_(master.detach())

    return step


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, the candidates taking turns; two rounds of warm-up are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(-2, repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Host AdamW, ns per parameter.")
    parser.add_argument("--params", type=int, default=64 * MI, help="parameters (default 64 Mi)")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs (default 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    grad = (torch.randn(options.params) * 1e-3).bfloat16()
    steps = {"torch": torch_step(grad)}
    for isa in available_isas():
        steps[isa] = split_step(isa, grad, options.threads)
        for state in ("compact", "minimal"):
            steps[f"{isa} {state}"] = compact_step(
                isa, grad, options.threads, is_minimal=state == "minimal"
            )
    seconds = measure(steps, options.repeats)
    set_host_isa("auto")

    median_ns = {
        name: statistics.median(runs) / options.params * 1e9 for name, runs in seconds.items()
    }
    print(
        f"{cpu_name()}, {options.threads} threads, {options.params / MI:.1f} Mi parameters, "
        f"median of {options.repeats}"
    )
    print(f"{'kernel':<24}{'ns/parameter':>14}{'against torch':>16}")
    for name, ns in median_ns.items():
        label = "torch fused + casts" if name == "torch" else f"outcore {name}"
        print(f"{label:<24}{ns:>14.3f}{median_ns['torch'] / ns:>15.2f}x")

    if options.json:
        figures = {
            "cpu": cpu_name(),
            "num_cores": os.cpu_count(),
            "num_threads": options.threads,
            "torch": torch.__version__,
            "num_params": options.params,
            "median_ns_per_param": median_ns,
            "seconds": seconds,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
