"""The same training by plain Hugging Face and ``torch.optim.AdamW`` in fp32, to compare with.

Outcore agrees with torch to rounding, not to the bit. Where a parameter's gradient is nothing but
rounding noise (a key bias: softmax does not see it), Adam scales the noise up to full steps, and
no two implementations agree. torch tells which parameters these are: it trains twice, with both of
its AdamW implementations, and with each batch whole and in halves, which changes only roundings.
Where the two differ, Outcore cannot be asked to be closer than they are to each other.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import outcore
from outcore.optim.gradients import squared_norm
from outcore.verify.exactness import ModelFactory, VerifyJob, free_memory, param_groups, run_steps

TOLERANCE = 1e-5  # largest relative difference from torch that counts as rounding
NOISE = 1e-6  # torch's implementations differ by more than this: the gradient is noise
NOISE_FACTOR = 10  # such a parameter may be this many times as far from torch as torch from itself


@dataclass(frozen=True, kw_only=True)
class PlainTorchComparison:
    """Relative differences by parameter after all steps."""

    differences: dict[str, float]  # of Outcore from torch
    noise: dict[str, float]  # of torch from itself, for the parameters that it decides
    seconds: float

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter that differs most, and by how much; those of noise do not count."""
        counted = {name: d for name, d in self.differences.items() if name not in self.noise}
        # NaN is neither more nor less than anything: it must be looked for
        return max(
            counted.items(),
            key=lambda item: (math.isnan(item[1]), item[1]),
            default=("", math.nan),
        )

    @property
    def too_far(self) -> list[str]:
        """The parameters that differ by more than rounding explains."""
        limits = {name: max(TOLERANCE, NOISE_FACTOR * noise) for name, noise in self.noise.items()}
        return [n for n, d in self.differences.items() if not d <= limits.get(n, TOLERANCE)]

    @property
    def is_close(self) -> bool:
        return not self.too_far and len(self.noise) < len(self.differences)


def check_against_plain_torch(make_model: ModelFactory, job: VerifyJob) -> PlainTorchComparison:
    """Train with torch twice and with Outcore once, and say how far apart they end."""
    start = time.perf_counter()
    theirs = train_plain(make_model, job, fused=False)
    again = train_plain(make_model, job, fused=True)
    differences = relative_differences(train_ours(make_model, job), theirs)
    noise = {n: d for n, d in relative_differences(again, theirs).items() if not d <= NOISE}
    return PlainTorchComparison(
        differences=differences, noise=noise, seconds=time.perf_counter() - start
    )


def compare_with_plain_torch(make_model: ModelFactory, job: VerifyJob) -> dict[str, float]:
    """Return each parameter's relative difference from plain Hugging Face + torch.optim.AdamW."""
    theirs = train_plain(make_model, job, fused=False)
    return relative_differences(train_ours(make_model, job), theirs)


def train_plain(make_model: ModelFactory, job: VerifyJob, *, fused: bool) -> dict[str, Tensor]:
    """Return the parameters, on the host, of a run without Outcore.

    It has foreach AdamW; or fused AdamW, and each batch backwards in halves, to round differently.
    """
    torch.manual_seed(job.seed)
    model = make_model().to(job.device).float().eval()
    optimizer = torch.optim.AdamW(
        param_groups(model, job.weight_decay),
        lr=job.lr,
        betas=(0.9, 0.95),
        fused=fused,
        foreach=not fused,
    )
    if job.max_grad_norm is not None:
        optimizer.register_step_pre_hook(functools.partial(_clip, model, job.max_grad_norm))
    try:
        run_steps(model, optimizer, job, rounds_otherwise=fused)
        return {name: _on_host(parameter) for name, parameter in model.named_parameters()}
    finally:
        del model, optimizer
        free_memory()


def train_ours(make_model: ModelFactory, job: VerifyJob) -> dict[str, Tensor]:
    """Return the parameters, on the host, of Outcore's run in fp32.

    Without dropout and over the whole batch at once: torch draws dropout and rounds its sums
    differently for other micro-batches.
    """
    torch.manual_seed(job.seed)
    model = make_model().eval()
    # The homes are named: without them the machine would be measured first, to make a plan.
    homes = {"weights": "host", "state": "host"}
    options = {**homes, **job.options, "dtype": torch.float32, "compile": False}
    model = outcore.offload(model, device=job.device, micro_batch=job.sequences, **options)
    optimizer = outcore.AdamW(
        param_groups(model, job.weight_decay),
        lr=job.lr,
        betas=(0.9, 0.95),
        max_grad_norm=job.max_grad_norm,
    )
    try:
        run_steps(model, optimizer, replace(job, micro_batch=job.sequences))
        optimizer.synchronize()
        return {name: _on_host(parameter) for name, parameter in model.named_parameters()}
    finally:
        outcore.engine_of(model).close()
        del model, optimizer
        free_memory()


def relative_differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return, by name, the norm of the difference over the norm of ``theirs``."""
    missing = ours.keys() ^ theirs.keys()
    assert not missing, f"the two runs have other parameters: {sorted(missing)}"
    return {name: _relative_difference(ours[name], value) for name, value in theirs.items()}


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.double().norm()
    difference = (ours.double() - theirs.double()).norm()
    return float(difference / scale) if scale > 0 else float(difference)


def _clip(model: nn.Module, max_grad_norm: float, *_: Any) -> None:
    """Clip as torch does, to the norm in fp64: its own fp32 sums lose digits in large tensors."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(math.fsum(float(squared_norm(gradient)) for gradient in gradients))
    nn.utils.clip_grads_with_norm_(model.parameters(), max_grad_norm, torch.tensor(norm))


def _on_host(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", copy=True)
