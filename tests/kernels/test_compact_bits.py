"""Compact AdamW has the same bits on every path, with any threads, and however it is split."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from adamw_states import NUM_STEPS, assert_same_bits, scalars_of
from compact_states import FIRST_ELEMENT, CompactState, grad_of
from torch import Tensor

from outcore.kernels import compact_format as format_module
from outcore.kernels import host_isa
from outcore.kernels.compact_format import BLOCK, CompactFormat

LENGTHS = (1, 127, 128, 17_003)
formats = pytest.mark.parametrize("format", ["compact", "minimal"])
grads = pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])


@functools.cache
def torch_result(n: int, format: CompactFormat, grad_dtype: torch.dtype) -> dict[str, Tensor]:
    state = CompactState.make(n, format)
    for step in range(1, NUM_STEPS + 1):
        grad = grad_of(n, step, grad_dtype)
        state.step_by_torch(grad, scalars_of(step), seed=7, step=step, first_element=FIRST_ELEMENT)
    return state.tensors()


@grads
@formats
@pytest.mark.parametrize("n", LENGTHS)
def test_library_and_torch_operations_agree(
    isa: str, n: int, format: CompactFormat, grad_dtype: torch.dtype
) -> None:
    assert host_isa() == isa
    state = CompactState.make(n, format)
    for step in range(1, NUM_STEPS + 1):
        grad = grad_of(n, step, grad_dtype)
        state.step(grad, scalars_of(step), seed=7, step=step, first_element=FIRST_ELEMENT)
    assert_same_bits(state.tensors(), torch_result(n, format, grad_dtype), isa)


@formats
def test_splitting_into_calls_does_not_change_bits(isa: str, format: CompactFormat) -> None:
    n = 40_003
    whole, split = CompactState.make(n, format), CompactState.make(n, format)
    bounds = [0, BLOCK, 5 * BLOCK, 200 * BLOCK, n]
    for step in range(1, 4):
        grad = grad_of(n, step, torch.bfloat16)
        whole.step(grad, scalars_of(step), seed=7, step=step, first_element=FIRST_ELEMENT)
        for begin, end in itertools.pairwise(bounds):
            split.part(slice(begin, end)).step(
                grad[begin:end],
                scalars_of(step),
                seed=7,
                step=step,
                first_element=FIRST_ELEMENT + begin,
            )
    assert_same_bits(split.tensors(), whole.tensors(), isa)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.usefixtures("needs_library")
def test_threads_do_not_change_bits(threads: int) -> None:
    n = 100_003
    state, other = CompactState.make(n, "compact"), CompactState.make(n, "compact")
    grad = grad_of(n, 1, torch.bfloat16)
    state.step(grad, scalars_of(1), seed=7, step=1)
    other.step(grad, scalars_of(1), seed=7, step=1, threads=threads)
    assert_same_bits(other.tensors(), state.tensors(), f"{threads} threads")


@formats
def test_chunks_of_the_torch_path_do_not_change_bits(
    format: CompactFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 10_007
    whole, chunked = CompactState.make(n, format), CompactState.make(n, format)
    grad = grad_of(n, 1, torch.float32)
    whole.step_by_torch(grad, scalars_of(1), seed=7, step=1)
    monkeypatch.setattr(format_module, "CHUNK", 5 * BLOCK)
    chunked.step_by_torch(grad, scalars_of(1), seed=7, step=1)
    assert_same_bits(chunked.tensors(), whole.tensors(), "chunks")


@formats
def test_gradients_that_are_not_finite_have_one_result(isa: str, format: CompactFormat) -> None:
    n = 10 * BLOCK + 5
    state, reference = CompactState.make(n, format), CompactState.make(n, format)
    for step in range(1, 4):
        grad = grad_of(n, step, torch.float32)
        if step == 2:
            grad[5 * BLOCK + 3 : 5 * BLOCK + 7] = torch.tensor(
                [float("nan"), -float("nan"), float("inf"), -float("inf")]
            )
            grad[7 * BLOCK + 1] = 3e38  # finite, though its square is not
            grad[-1] = float("nan")
        state.step(grad, scalars_of(step), seed=7, step=step)
        reference.step_by_torch(grad, scalars_of(step), seed=7, step=step)
        assert_same_bits(state.tensors(), reference.tensors(), f"{isa}, step {step}")
    not_finite = (~state.weight.isfinite()).nonzero().flatten().tolist()
    assert not_finite == [5 * BLOCK + 3, 5 * BLOCK + 4, 5 * BLOCK + 5, 5 * BLOCK + 6, n - 1]
    is_nan = state.weight.isnan()
    assert (state.weight[is_nan].view(torch.int16) == 0x7FC0).all()


def test_weights_that_are_not_finite_stay_so(isa: str) -> None:
    """Rounding adds to the bits of a number, and must not carry a NaN over to minus zero."""
    bits = torch.tensor([0x7FFF, -1, 0x7FC0, 0x7F80, -0x80], dtype=torch.int16)
    weight = bits.view(torch.bfloat16)
    for format in ("compact", "minimal"):
        state = CompactState.make(5, format)
        state.weight.copy_(weight)
        if state.remainder is not None:
            state.remainder.fill_(0)
        for step in range(1, 50):
            state.step(torch.zeros(5), scalars_of(step), seed=0, step=step)
        assert state.weight[:3].isnan().all(), isa
        assert state.weight[3:].isinf().all(), isa
