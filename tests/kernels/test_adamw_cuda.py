"""On a CUDA device: Triton and torch operations give the bits of the C++ library."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from adamw_states import NUM_STEPS, State, assert_same_bits, hostile_grad, scalars_of

from outcore.kernels import adamw_torch, join_master, split_master

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("n", [1, 1_023, 16 << 20])
def test_triton_agrees_with_the_library(n: int, grad_dtype: torch.dtype, split: bool) -> None:
    host = State.make(n, split=split)
    device = host.to("cuda")
    for step in range(1, NUM_STEPS + 1):
        grad = hostile_grad(n, step, grad_dtype)
        host.step(grad, scalars_of(step))
        device.step(grad.cuda(), scalars_of(step))
        assert_same_bits(device.tensors(), host.tensors(), f"step {step}")


@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
def test_torch_operations_agree_with_the_host(split: bool) -> None:
    n = 3_000_001
    host = State.make(n, split=split)
    device = host.to("cuda")
    for step in range(1, NUM_STEPS + 1):
        grad = hostile_grad(n, step, torch.bfloat16)
        host.step(grad, scalars_of(step))
        adamw_torch.adamw_(**vars(device), grad=grad.cuda(), scalars=scalars_of(step))
        assert_same_bits(device.tensors(), host.tensors(), f"step {step}")


def test_split_and_join_agree_with_the_host() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int64).to(torch.int32)
    master = bits.view(torch.float32)
    host, device = split_master(master), split_master(master.cuda())
    for on_host, on_device in zip(host, device, strict=True):
        assert torch.equal(on_device.cpu().view(torch.int16), on_host.view(torch.int16))
    assert torch.equal(join_master(*device).cpu().view(torch.int32), bits)
