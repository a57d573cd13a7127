"""Every path gives the same bits: each instruction set, any number of threads, torch operations."""

from __future__ import annotations

import functools

import pytest
import torch
from adamw_states import NUM_STEPS, State, assert_same_bits, hostile_grad, scalars_of
from torch import Tensor

from outcore.kernels import adamw_torch, host_isa

LENGTHS = (1, 7, 16_385, 1_000_003)
grads = pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
splits = pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])


@functools.cache
def torch_result(n: int, grad_dtype: torch.dtype, split: bool) -> dict[str, Tensor]:
    state = State.make(n, split=split)
    for step in range(1, NUM_STEPS + 1):
        adamw_torch.adamw_(
            **vars(state), grad=hostile_grad(n, step, grad_dtype), scalars=scalars_of(step)
        )
    return state.tensors()


@grads
@splits
@pytest.mark.parametrize("n", LENGTHS)
def test_library_and_torch_operations_agree(
    isa: str, n: int, grad_dtype: torch.dtype, split: bool
) -> None:
    assert host_isa() == isa
    state = State.make(n, split=split)
    for step in range(1, NUM_STEPS + 1):
        state.step(hostile_grad(n, step, grad_dtype), scalars_of(step))
    assert_same_bits(state.tensors(), torch_result(n, grad_dtype, split), isa)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.usefixtures("needs_library")
def test_threads_do_not_change_bits(threads: int) -> None:
    n = 100_003
    state, other = State.make(n, split=True), State.make(n, split=True)
    grad = hostile_grad(n, 1, torch.bfloat16)
    state.step(grad, scalars_of(1))
    other.step(grad, scalars_of(1), threads=threads)
    assert_same_bits(other.tensors(), state.tensors(), f"{threads} threads")


def test_chunks_of_the_torch_path_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 10_007
    whole, chunked = State.make(n, split=True), State.make(n, split=True)
    grad = hostile_grad(n, 1, torch.float32)
    adamw_torch.adamw_(**vars(whole), grad=grad, scalars=scalars_of(1))
    monkeypatch.setattr(adamw_torch, "CHUNK", 1_000)
    adamw_torch.adamw_(**vars(chunked), grad=grad, scalars=scalars_of(1))
    assert_same_bits(chunked.tensors(), whole.tensors(), "chunks")


def test_the_split_state_steps_as_the_fp32_state(isa: str) -> None:
    """The remainder makes the bf16 weight an fp32 master: nothing is lost, however small."""
    from outcore.kernels import join_master

    n = 50_001
    split, plain = State.make(n, split=True), State.make(n, split=False)
    for step in range(1, NUM_STEPS + 1):
        grad = hostile_grad(n, step, torch.bfloat16)
        split.step(grad, scalars_of(step))
        plain.step(grad, scalars_of(step))
    assert split.remainder is not None
    joined = {"weight": join_master(split.weight, split.remainder)}
    assert_same_bits(joined, {"weight": plain.weight}, isa)


def test_hostile_gradients_reach_subnormal_moments() -> None:
    """Else the tests above would say nothing about subnormals."""
    result = torch_result(16_385, torch.float32, True)
    for name in ("exp_avg", "exp_avg_sq"):
        magnitude = result[name].abs()
        assert ((magnitude > 0) & (magnitude < torch.finfo(torch.float32).tiny)).any(), name
