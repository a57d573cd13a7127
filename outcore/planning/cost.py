"""How long each piece of a step takes on a machine.

The machine's figures are what the probe measures: large, clean operations, sustained. The
efficiencies here are what a transformer reaches of them, on one H200 (docs/planning.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from outcore.kernels.packed_format import FORMATS
from outcore.machine.machine import Machine
from outcore.model_spec import BlockSpec, ModelSpec
from outcore.planning.device_type import device_type
from outcore.planning.plan import Job
from outcore.planning.state_bytes import StateBytes
from outcore.store.packed_spans import packed_bytes
from outcore.units import BYTES_OF

MATMUL_EFFICIENCY = 1.0  # of sustained products, beside reading the weights
ATTENTION_HALF_TOKENS = 1050  # sequences of this length get half of attention's rate
FP32_MATMUL_SHARE = 0.5  # TF32 products run at half the rate of bf16 ones
FORWARD_TRAFFIC = 1.5  # element-wise reads and writes, in units of what the backward reads
BACKWARD_TRAFFIC = 3.0
ACCUMULATE_BYTES = 10  # a parameter and micro-batch: fp32 sum in and out, bf16 gradient in
FIRST_ACCUMULATE_BYTES = 6  # the first micro-batch starts the sum
GRADIENT_OUT_BYTES = 10  # a parameter: norm, and the cast to the type that travels
LOSS_BYTES_PER_LOGIT = 8
LAUNCH_S = 60e-6  # between two micro-batches of a block
CLIPPING_S = 0.01  # reading the norm back, and the first launches after it; else no device waits
COPY_LATENCY_S = 20e-6
DISK_LATENCY_S = 1e-3
DISK_UPDATE_SHARE = 0.88  # that updates get of reads and writes which only stream


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Seconds of one block over the whole batch."""

    forward_s: float
    differentiate_s: float  # the backward without the recompute


class Costs:
    """Durations for one model, machine, job and micro-batch."""

    def __init__(self, spec: ModelSpec, machine: Machine, job: Job, micro_batch: int) -> None:
        self.machine = machine
        self.tokens = job.sequences * job.seq_len
        self.bytes = StateBytes.of(job)
        self.disk_update_bytes_s = machine.disk_both_ways_bytes_s * DISK_UPDATE_SHARE
        self._job = job
        self._spec = spec
        self._beside_updates = 0 if machine.is_unified else self._linked_beside_updates(job)
        self.step_start_s = 0.0 if job.clipping == "none" else CLIPPING_S
        self._num_micro_batches = -(-job.sequences // micro_batch)
        self._matmul_flops_s = machine.matmul_flops_s * MATMUL_EFFICIENCY
        if job.dtype == "fp32" and device_type(machine) == "cuda":  # a CPU's figure is fp32's
            self._matmul_flops_s *= FP32_MATMUL_SHARE
        self._block = lru_cache(maxsize=None)(self._block_cost)
        self.blocks = tuple(
            self._block(
                b.parameters,
                b.trainable_parameters,
                b.forward_flops_per_token,
                b.attention_flops(job.seq_len),
                b.graph_bytes_per_token(job.dtype),
                self._expanding_bytes(b),
            )
            for b in spec.blocks
        )

    def _block_cost(
        self,
        parameters: int,
        trainable: int,
        flops_per_token: float,
        attention_flops: float,
        graph_bytes: float,
        expanding_bytes: float,
    ) -> BlockCost:
        machine, count = self.machine, self._num_micro_batches
        product_s = flops_per_token * self.tokens / self._matmul_flops_s
        # Each micro-batch reads all weights again; this binds only where it is small.
        read_s = count * parameters * self.bytes.weight / machine.device_memory_bytes_s
        seq_len = self._job.seq_len
        attention_share = seq_len / (seq_len + ATTENTION_HALF_TOKENS)
        attention = attention_flops * self._job.sequences / attention_share
        traffic_s = graph_bytes * self.tokens / machine.device_memory_bytes_s
        accumulate = FIRST_ACCUMULATE_BYTES + (count - 1) * ACCUMULATE_BYTES + GRADIENT_OUT_BYTES
        trained_share = trainable / parameters
        return BlockCost(
            # Each pass expands the weights once; that of a backward which recomputes is here, too.
            forward_s=expanding_bytes / machine.device_memory_bytes_s
            + product_s
            + read_s
            + attention / machine.attention_forward_flops_s
            + FORWARD_TRAFFIC * traffic_s
            + count * LAUNCH_S,
            differentiate_s=(product_s + read_s) * (1 + trained_share)
            + 2 * attention / machine.attention_backward_flops_s
            + BACKWARD_TRAFFIC * traffic_s
            + accumulate * trainable / machine.device_memory_bytes_s
            + count * LAUNCH_S,
        )

    def _expanding_bytes(self, block: BlockSpec) -> float:
        """Return what expanding a block's packed matrices reads and writes."""
        format = self._job.frozen_weights
        if format is None:
            return 0.0
        packed = packed_bytes(block.frozen_matrices, FORMATS[format])
        return packed + block.expanded_numel(format) * self.bytes.weight

    @property
    def head_s(self) -> float:
        """Head and loss, with their gradients, chunk by chunk."""
        spec, memory_bytes_s = self._spec, self.machine.device_memory_bytes_s
        if not spec.head_parameters:
            return 0.0
        products = 6.0 * spec.head_parameters * self.tokens / self._matmul_flops_s
        return products + LOSS_BYTES_PER_LOGIT * self.tokens * spec.vocabulary / memory_bytes_s

    @property
    def embedding_s(self) -> float:
        """Looking rows up, or making the gradient of the table."""
        edges = sum(e.parameters for e in self._spec.edges if not e.runs_as_block)
        hidden = self.tokens * self._spec.hidden_size * BYTES_OF[self._job.dtype]
        return (hidden * 2 + edges * self.bytes.weight) / self.machine.device_memory_bytes_s

    def update_on_host_s(self, numel: float) -> float:
        """With or without the visitor's help: both are bound by the host's memory.

        So is what crosses the link meanwhile, which the probe's update had not beside it.
        """
        traffic = self.bytes.update_traffic + self._beside_updates
        return numel * traffic / self.machine.host_update_bytes_s

    def _linked_beside_updates(self, job: Job) -> int:
        """Return the bytes a parameter that cross the link while updates run.

        Where gradients wait these are the weights of the forward that updates hide behind, else
        those of both passes and the gradient.
        """
        sizes = self.bytes
        return sizes.weight if job.gradients_wait else 2 * sizes.weight + sizes.gradient

    def update_on_device_s(self, numel: float) -> float:
        return numel * self.bytes.update_traffic / self.machine.device_memory_bytes_s

    def to_device_s(self, num_bytes: float, *, both_ways: bool = False) -> float:
        rate = self.machine.both_ways_bytes_s if both_ways else self.machine.to_device_bytes_s
        return 0.0 if self.machine.is_unified else num_bytes / rate + COPY_LATENCY_S

    def to_host_s(self, num_bytes: float, *, both_ways: bool = False) -> float:
        rate = self.machine.both_ways_bytes_s if both_ways else self.machine.to_host_bytes_s
        return 0.0 if self.machine.is_unified else num_bytes / rate + COPY_LATENCY_S

    def disk_read_s(self, num_bytes: float) -> float:
        return num_bytes / self.machine.disk_read_bytes_s + DISK_LATENCY_S

    def disk_write_s(self, num_bytes: float) -> float:
        return num_bytes / self.machine.disk_write_bytes_s + DISK_LATENCY_S

    def disk_update_s(self, num_bytes: float) -> float:
        """Reading state, or writing it back: each runs beside the other."""
        return num_bytes / self.disk_update_bytes_s + DISK_LATENCY_S


def input_bytes(block: BlockSpec, job: Job) -> int:
    """Return the bytes of a block's input for the whole batch."""
    return block.input_bytes_per_token(job.dtype) * job.sequences * job.seq_len
