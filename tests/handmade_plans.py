"""Plans and machines made by hand, for tests that need one and no planner."""

from dataclasses import replace
from typing import Any

from outcore.machine.machine import Machine
from outcore.planning.plan import BlockPlan, Budgets, Job, Plan, Prediction, Span

GIB = 2**30


def make_timeline(num_blocks: int = 28) -> tuple[Span, ...]:
    """A step as the engine runs it: the forward waits for updates, the backward for nothing."""
    update_s, forward_s, backward_s, copy_s = 0.0597, 0.0347, 0.0867, 0.02
    spans = []

    def add(lane: str, name: str, start_s: float, took_s: float) -> None:
        spans.append(Span(lane=lane, name=name, start_s=start_s, end_s=start_s + took_s))

    for block in range(num_blocks):
        start_s = block * update_s
        add("host cores", f"update {block}", start_s, update_s)
        add("to device", f"weights {block}", start_s + update_s - copy_s, copy_s)
        add("compute", f"forward {block}", start_s + update_s - forward_s, forward_s)
    for index in range(num_blocks):
        block = num_blocks - 1 - index
        start_s = num_blocks * update_s + index * backward_s
        add("to device", f"weights {block}", start_s - copy_s / 2, copy_s)
        add("compute", f"backward {block}", start_s, backward_s)
        add("to host", f"gradient {block}", start_s + backward_s - copy_s, copy_s)
    return tuple(spans)


def make_plan(**changes: Any) -> Plan:
    """Qwen2.5-7B on an H200 with 24 GiB allowed, with plausible figures."""
    recomputed = BlockPlan(weights="host", state="host", activations="recompute")
    blocks = (
        *[BlockPlan(weights="device", state="device", activations="recompute")] * 2,
        *[recomputed] * 20,
        *[BlockPlan(weights="host", state="host", activations="keep")] * 6,
    )
    plan = Plan(
        model="qwen2.5-7b",
        machine="h200-pcie5",
        job=Job(tokens=32768, seq_len=2048, budgets=Budgets(device_bytes=24 * GIB)),
        blocks=blocks,
        edge_state="host",
        micro_batch=4,
        num_slots=3,
        num_visits=2,
        peak_bytes={
            "device": {
                "edge weights": 2 * GIB,
                "slots": 3 * GIB // 2,
                "block inputs": 6 * GIB,
                "kept activations": 11 * GIB,
                "gradient buffers": 2 * GIB,
            },
            "host": {"weights": 13 * GIB, "optimizer state": 71 * GIB, "gradients": 13 * GIB},
        },
        prediction=Prediction(
            step_s=4.1,
            tokens_per_s=32768 / 4.1,
            tflops=372.0,
            busy_s={
                "compute": 3.4,
                "to device": 1.12,
                "to host": 0.56,
                "host cores": 1.67,
            },
            binding_lane="host cores",
            hiding_tokens=45_000,
            timeline=make_timeline(),
        ),
    )
    return replace(plan, **changes)


def make_machine(**changes: Any) -> Machine:
    """The H200 box of the project's figures."""
    machine = Machine(
        name="h200-pcie5",
        device_name="NVIDIA H200",
        device_memory_bytes=140 * GIB,
        host_memory_bytes=125 * GIB,
        num_cores=16,
        disk_bytes=64 * GIB,
        to_device_bytes_s=55e9,
        to_host_bytes_s=55e9,
        both_ways_bytes_s=50e9,
        pageable_bytes_s=6.7e9,
        host_read_bytes_s=91e9,
        host_copy_bytes_s=73e9,
        host_update_bytes_s=117e9,
        disk_read_bytes_s=3.4e9,
        disk_write_bytes_s=2e9,
        disk_both_ways_bytes_s=1.3e9,
        matmul_flops_s=770e12,
        attention_forward_flops_s=609e12,
        attention_backward_flops_s=501e12,
        device_memory_bytes_s=4e12,
        price_per_hour=3.5,
    )
    return replace(machine, **changes)
