"""Machines and models for the planner's tests, as plain values."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from outcore.attention_spec import Attention
from outcore.machine.machine import Machine
from outcore.model_spec import BlockSpec, EdgeSpec, ModelSpec
from outcore.planning.plan import Job

GIB = 2**30

H200 = Machine(
    name="h200-box",
    device_name="NVIDIA H200",
    device_memory_bytes=149_557_477_375,  # what torch reports as free
    host_memory_bytes=135_148_457_984,
    num_cores=16,
    disk_bytes=64 * GIB,
    to_device_bytes_s=55.1e9,
    to_host_bytes_s=55.2e9,
    both_ways_bytes_s=44.2e9,
    pageable_bytes_s=8.4e9,
    host_read_bytes_s=96e9,
    host_copy_bytes_s=72.5e9,
    host_update_bytes_s=163.6e9,
    disk_read_bytes_s=2.7e9,
    disk_write_bytes_s=1.9e9,
    disk_both_ways_bytes_s=1.4e9,
    matmul_flops_s=673e12,
    attention_forward_flops_s=532e12,
    attention_backward_flops_s=454e12,
    device_memory_bytes_s=4.268e12,
)


def tiny_spec(
    *,
    num_blocks: int = 4,
    hidden: int = 1024,
    block_parameters: int = 12_000_000,
    vocabulary: int = 32_000,
    active_share: float = 1.0,
) -> ModelSpec:
    """A decoder of equal blocks, without a configuration behind it."""
    numel = -(-block_parameters // 128) * 128
    block = BlockSpec(
        name="block",
        kind="block",
        parameters=block_parameters,
        trainable_parameters=block_parameters,
        active_parameters=block_parameters * active_share,
        numel=numel,
        trainable_numel=numel,
        attention=Attention(num_heads=8, key_width=hidden, value_width=hidden, is_causal=True),
        input_elements_per_token=hidden,
        kept_elements_per_token=16 * hidden,
        kept_statistics_per_token=10,
        widest_elements_per_token=4 * hidden,
    )

    def edge(name: str, parameters: int, *, runs_as_block: bool, before: int) -> EdgeSpec:
        numel = -(-parameters // 128) * 128
        return EdgeSpec(
            name=name,
            parameters=parameters,
            numel=numel,
            trainable_numel=numel,
            deliveries=(numel if runs_as_block else parameters,),
            runs_as_block=runs_as_block,
            num_blocks_before=before,
        )

    table = vocabulary * hidden
    return ModelSpec(
        name="tiny",
        blocks=(block,) * num_blocks,
        edges=(
            edge("embedding", table, runs_as_block=False, before=0),
            edge("norm", hidden, runs_as_block=True, before=num_blocks),
            edge("head", table, runs_as_block=False, before=num_blocks),
        ),
        hidden_size=hidden,
        vocabulary=vocabulary,
        head_parameters=table,
        is_tied=False,
    )


@st.composite
def specs(draw: Any) -> ModelSpec:
    hidden = draw(st.sampled_from([512, 1024, 4096]))
    return tiny_spec(
        num_blocks=draw(st.integers(2, 12)),
        hidden=hidden,
        block_parameters=hidden * hidden * draw(st.integers(4, 40)) + draw(st.integers(0, 500)),
        vocabulary=draw(st.sampled_from([1000, 32_000, 150_000])),
        active_share=draw(st.sampled_from([1.0, 0.25])),
    )


@st.composite
def machines(draw: Any) -> Machine:
    def between(low: float, high: float) -> float:
        return float(draw(st.floats(low, high)))

    link = between(3e9, 900e9)
    matmul = between(10e12, 2000e12)
    has_disk = draw(st.booleans())
    return Machine(
        name="random",
        device_name="random",
        device_memory_bytes=draw(st.integers(2 * GIB, 200 * GIB)),
        host_memory_bytes=draw(st.integers(4 * GIB, 500 * GIB)),
        num_cores=16,
        disk_bytes=draw(st.integers(0, 1000 * GIB)) if has_disk else 0,
        is_unified=draw(st.booleans()) and draw(st.booleans()),
        to_device_bytes_s=link,
        to_host_bytes_s=link,
        both_ways_bytes_s=0.9 * link,
        pageable_bytes_s=link / 8,
        host_read_bytes_s=100e9,
        host_copy_bytes_s=80e9,
        host_update_bytes_s=between(20e9, 400e9),
        disk_read_bytes_s=between(1e9, 14e9) if has_disk else 0.0,
        disk_write_bytes_s=between(1e9, 10e9) if has_disk else 0.0,
        disk_both_ways_bytes_s=between(0.5e9, 10e9) if has_disk else 0.0,
        matmul_flops_s=matmul,
        attention_forward_flops_s=0.8 * matmul,
        attention_backward_flops_s=0.6 * matmul,
        device_memory_bytes_s=between(200e9, 8e12),
    )


@st.composite
def jobs(draw: Any) -> Job:
    seq_len = draw(st.sampled_from([512, 2048, 8192]))
    return Job(
        tokens=seq_len * draw(st.integers(1, 32)),
        seq_len=seq_len,
        clipping=draw(st.sampled_from(["waiting", "two-pass", "none"])),
        state_format=draw(st.sampled_from(["fp32", "compact", "minimal"])),
    )
