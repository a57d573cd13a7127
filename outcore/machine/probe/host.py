"""Host memory as the engine uses it: reading, copying, and the AdamW update of its own kernel."""

from __future__ import annotations

import torch

from outcore.kernels import AdamWScalars, adamw_, host_isa
from outcore.store.host_arena import HostArena, aligned_bytes
from outcore.store.ledger import Ledger

from .report import HostFigures
from .sizes import ProbeSizes
from .timing import seconds_per_call

_CPU = torch.device("cpu")
UPDATE_BYTES_PER_PARAM = 26  # 14 read (weight, remainder, two moments, gradient), 12 written


def measure_host(sizes: ProbeSizes) -> HostFigures:
    """Use all cores, as torch and the kernel do by default."""
    read_bytes_s, copy_bytes_s = _read_and_copy(sizes)
    return HostFigures(
        read_bytes_s=read_bytes_s,
        copy_bytes_s=copy_bytes_s,
        update_bytes_s=_update(sizes),
        update_kernel=host_isa(),
        num_threads=torch.get_num_threads(),
    )


def _read_and_copy(sizes: ProbeSizes) -> tuple[float, float]:
    numel = sizes.host_bytes // 4
    arena = HostArena(
        2 * aligned_bytes(numel, torch.float32),
        purpose="probe",
        ledger=Ledger("host", None),
        pin=False,
    )
    source, target = (arena.span(numel, torch.float32) for _ in range(2))
    read_s = seconds_per_call(source.sum, device=_CPU, seconds=sizes.seconds)
    copy_s = seconds_per_call(lambda: target.copy_(source), device=_CPU, seconds=sizes.seconds)
    return numel * 4 / read_s, 2 * numel * 4 / copy_s


def _update(sizes: ProbeSizes) -> float:
    numel = sizes.update_params
    dtypes = {
        "weight": torch.bfloat16,
        "remainder": torch.int16,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
        "grad": torch.bfloat16,
    }
    num_bytes = sum(aligned_bytes(numel, dtype) for dtype in dtypes.values())
    arena = HostArena(num_bytes, purpose="probe", ledger=Ledger("host", None), pin=False)
    state = {name: arena.span(numel, dtype) for name, dtype in dtypes.items()}
    state["weight"].fill_(0.02)  # ordinary numbers: zeros would divide 0 by eps only
    state["grad"].fill_(1e-3)
    scalars = AdamWScalars.of(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)

    def update() -> None:
        adamw_(
            weight=state["weight"],
            remainder=state["remainder"],
            exp_avg=state["exp_avg"],
            exp_avg_sq=state["exp_avg_sq"],
            grad=state["grad"],
            scalars=scalars,
        )

    return (
        numel
        * UPDATE_BYTES_PER_PARAM
        / seconds_per_call(update, device=_CPU, seconds=sizes.seconds)
    )
