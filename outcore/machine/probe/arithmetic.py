"""The device's arithmetic at the shapes of transformer blocks, and its memory.

Products count 2 operations a multiply-add. Causal attention counts half of the square: forward two
products (4 · sequences · heads · positions² · head size, halved), backward the five that it needs
(2.5 times the forward). The default SDPA backend runs, as it does in the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .report import DeviceFigures
from .sizes import ProbeSizes
from .timing import seconds_per_call


def measure_device(
    device: torch.device, sizes: ProbeSizes, *, note: Callable[[str], None]
) -> DeviceFigures:
    dtype = _dtype(device)
    if dtype is torch.float16:
        note("this GPU has no bf16: products and attention were measured in fp16")
    forward_flops_s, backward_flops_s = _attention(device, dtype, sizes)
    return DeviceFigures(
        dtype=str(dtype).removeprefix("torch."),
        matmul_flops_s=_matmul(device, dtype, sizes),
        fp8_matmul_flops_s=_fp8_matmul(device, sizes, note),
        attention_forward_flops_s=forward_flops_s,
        attention_backward_flops_s=backward_flops_s,
        memory_bytes_s=_memory(device, sizes),
    )


def _dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        # Without bf16 instructions a CPU takes 100 to 400 times as long: not even tried.
        return torch.float32
    supported = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if supported else torch.float16


def _matmul(device: torch.device, dtype: torch.dtype, sizes: ProbeSizes) -> float:
    """All shapes once, as a block has them: operations over the sum of their times."""
    flops, total_s = 0, 0.0
    for num_in, num_out in sizes.matmul_shapes:
        rows = torch.randn(sizes.matmul_rows, num_in, device=device, dtype=dtype)
        weight = torch.randn(num_out, num_in, device=device, dtype=dtype) * 0.02

        def multiply(rows: Tensor = rows, weight: Tensor = weight) -> Tensor:
            return F.linear(rows, weight)

        total_s += seconds_per_call(multiply, device=device, seconds=sizes.seconds)
        flops += 2 * sizes.matmul_rows * num_in * num_out
    return flops / total_s


def _fp8_matmul(
    device: torch.device, sizes: ProbeSizes, note: Callable[[str], None]
) -> float | None:
    """The same in 8 bits, scaled per tensor; None where device or torch has none."""
    if device.type != "cuda":
        return None
    is_amd = torch.version.hip is not None
    if not is_amd and torch.cuda.get_device_capability(device) < (8, 9):
        return None
    # MI300 has a format of its own; later AMD devices have the common one, and the first fails.
    dtypes = [torch.float8_e4m3fnuz, torch.float8_e4m3fn] if is_amd else [torch.float8_e4m3fn]
    reason = ""
    for dtype in dtypes:
        try:
            return _scaled_matmul(device, dtype, sizes)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    note(f"fp8 products could not be measured: {reason}")
    return None


def _scaled_matmul(device: torch.device, dtype: torch.dtype, sizes: ProbeSizes) -> float:
    flops, total_s = 0, 0.0
    scale = torch.ones((), device=device, dtype=torch.float32)
    for num_in, num_out in sizes.matmul_shapes:
        rows = torch.randn(sizes.matmul_rows, num_in, device=device).to(dtype)
        # The second factor lies column by column: the transpose of a plain weight.
        weight = torch.randn(num_out, num_in, device=device).to(dtype).t()

        def multiply(rows: Tensor = rows, weight: Tensor = weight) -> Tensor:
            product: Tensor = torch._scaled_mm(
                rows,
                weight,
                scale_a=scale,
                scale_b=scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
            return product

        total_s += seconds_per_call(multiply, device=device, seconds=sizes.seconds)
        flops += 2 * sizes.matmul_rows * num_in * num_out
    return flops / total_s


def _attention(device: torch.device, dtype: torch.dtype, sizes: ProbeSizes) -> tuple[float, float]:
    sequences, heads, positions, head_size = sizes.attention_shape
    query, key, value = (
        torch.randn(sizes.attention_shape, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    forward_flops = 4 * sequences * heads * positions**2 * head_size / 2

    def forward() -> Tensor:
        # With gradients asked for, as in training: the forward keeps what the backward needs.
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    forward_s = seconds_per_call(forward, device=device, seconds=sizes.seconds)
    output = forward()
    grad = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), grad, retain_graph=True)

    backward_s = seconds_per_call(backward, device=device, seconds=sizes.seconds)
    return forward_flops / forward_s, 2.5 * forward_flops / backward_s


def _memory(device: torch.device, sizes: ProbeSizes) -> float:
    source = torch.zeros(sizes.device_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_per_call(lambda: target.copy_(source), device=device, seconds=sizes.seconds)
    return 2 * source.numel() * 4 / copy_s
