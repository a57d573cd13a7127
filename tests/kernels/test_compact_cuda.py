"""On a CUDA device: compact AdamW by Triton and by torch operations gives the library's bits."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from adamw_states import NUM_STEPS, assert_same_bits, scalars_of
from compact_states import FIRST_ELEMENT, CompactState, grad_of

from outcore.kernels.compact_format import BLOCK, CompactFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
formats = pytest.mark.parametrize("format", ["compact", "minimal"])


@needs_triton
@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@formats
@pytest.mark.parametrize("n", [1, 1_023, 16 << 20])
def test_triton_agrees_with_the_library(
    n: int, format: CompactFormat, grad_dtype: torch.dtype
) -> None:
    host = CompactState.make(n, format)
    device = host.to("cuda")
    for step in range(1, NUM_STEPS + 1):
        grad = grad_of(n, step, grad_dtype)
        rounding = {"seed": 7, "step": step, "first_element": FIRST_ELEMENT}
        host.step(grad, scalars_of(step), **rounding)
        device.step(grad.cuda(), scalars_of(step), **rounding)
        assert_same_bits(device.tensors(), host.tensors(), f"step {step}")


@needs_triton
@pytest.mark.usefixtures("needs_library")
@formats
def test_triton_agrees_on_what_is_not_finite(format: CompactFormat) -> None:
    n = 10 * BLOCK + 5
    host = CompactState.make(n, format)
    device = host.to("cuda")
    for step in range(1, 4):
        grad = grad_of(n, step, torch.float32)
        if step == 2:
            grad[5 * BLOCK + 3], grad[5 * BLOCK + 4] = float("nan"), float("inf")
            grad[7 * BLOCK + 1], grad[-1] = 3e38, -float("inf")
        host.step(grad, scalars_of(step), seed=7, step=step)
        device.step(grad.cuda(), scalars_of(step), seed=7, step=step)
        assert_same_bits(device.tensors(), host.tensors(), f"step {step}")


@formats
def test_torch_operations_agree_with_the_host(format: CompactFormat) -> None:
    n = 3_000_001
    host = CompactState.make(n, format)
    device = host.to("cuda")
    for step in range(1, NUM_STEPS + 1):
        grad = grad_of(n, step, torch.bfloat16)
        host.step(grad, scalars_of(step), seed=7, step=step)
        device.step_by_torch(grad.cuda(), scalars_of(step), seed=7, step=step)
        assert_same_bits(device.tensors(), host.tensors(), f"step {step}")
