"""Offload, or more GPUs? Time and money for a number of tokens, both ways.

Offloading: N of this machine, each with the plan, data parallel. More GPUs: the fewest of the same
kind that hold the model without offloading, sharded. Pure arithmetic on the plan's prediction; the
assumptions are a value, and ``assumption_sentences`` says them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from outcore.machine.machine import Machine
from outcore.planning.device_type import device_type
from outcore.planning.plan import Plan
from outcore.units import format_bytes

_DAY_S = 86_400
_MOST_GPUS = 100_000
_EQUAL = 1.05  # times as much is still the same

Device = Literal["GPU", "machine"]
"""What there can be several of: a CPU, or a GPU with one memory, comes with its machine."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the comparison takes for granted."""

    # bf16 weight and gradient, fp32 master and two moments.
    resident_bytes_per_parameter: int = 16
    usable_share: float = 0.9  # of device memory: the rest is CUDA's, NCCL's and fragments
    gathered_blocks: int = 2  # bf16 weights of the block at work, and of the next one
    # Values of a block's inside that its backward needs, in bytes per token and hidden unit.
    inside_bytes_per_unit: int = 34
    sharded_efficiency: float = 0.85  # of a lone GPU's speed, where weights are gathered
    gradient_bytes_per_parameter: int = 2  # bf16, exchanged between machines once a step
    wrong_tool_days: float = 30.0
    # Sets to fine-tune on have millions of tokens to a few billion; models are trained further, and
    # from nothing, on tens of billions and more.
    pre_training_tokens: float = 1e10


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: how many GPUs, how long, for how much."""

    num_gpus: int
    tokens_per_s: float  # all GPUs together
    seconds: float
    dollars: float | None  # None: no price is known

    @property
    def days(self) -> float:
        return self.seconds / _DAY_S


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both ways, for the same number of tokens."""

    train_tokens: float
    price_per_hour: float | None
    device: Device
    offload: Way
    exchange_s: float  # of each offloaded step, for gradients between machines
    resident: Way | None  # None: not even one sequence fits beside the gathered blocks
    resident_bytes: int  # weights, gradients and state, all GPUs together
    frozen_bytes: int  # of these: weights that are not trained
    activation_bytes: int  # a GPU's, for one sequence, with checkpointing
    assumptions: Assumptions


def compare(
    plan: Plan,
    machine: Machine,
    *,
    num_parameters: int,
    hidden_size: int,
    train_tokens: float,
    num_frozen: int = 0,
    frozen_bytes: int = 0,
    num_gpus: int = 1,
    price_per_hour: float | None = None,
    assumptions: Assumptions | None = None,
) -> Comparison:
    """Return both ways. ``price_per_hour``: of one machine; the catalogue's if None.

    Of the parameters ``num_frozen`` are not trained (a base under adapters): weights alone, of
    ``frozen_bytes`` in all.
    """
    assume = assumptions or Assumptions()
    if not (math.isfinite(train_tokens) and train_tokens > 0):
        raise ValueError(f"the tokens to train on must be a positive number, not {train_tokens}")
    if num_gpus < 1:
        raise ValueError(f"the number of GPUs must be at least 1, not {num_gpus}")
    price = machine.price_per_hour if price_per_hour is None else price_per_hour
    num_trained = num_parameters - num_frozen
    exchange_s = gradient_exchange_s(machine, num_trained, num_gpus, assume)
    step_s = plan.prediction.step_s + exchange_s
    offload = _way(num_gpus, num_gpus * plan.job.tokens / step_s, train_tokens, price)

    activation_bytes = checkpointed_activation_bytes(plan, hidden_size, assume)
    resident_bytes = num_trained * assume.resident_bytes_per_parameter + frozen_bytes
    fewest = fewest_gpus(plan, machine, num_parameters, resident_bytes, activation_bytes, assume)
    resident = None
    if fewest is not None:
        # The plan's own compute lane, never waiting: the planner's figures on both sides. Gradients
        # that all have a home are clipped without a second pass.
        compute_s = plan.prediction.busy_s.get("compute") or plan.prediction.step_s
        compute_s /= plan.job.num_passes
        efficiency = assume.sharded_efficiency if fewest > 1 else 1.0
        tokens_per_s = fewest * efficiency * plan.job.tokens / compute_s
        resident = _way(fewest, tokens_per_s, train_tokens, price)
    return Comparison(
        train_tokens=train_tokens,
        price_per_hour=price,
        device="machine" if machine.is_unified or device_type(machine) == "cpu" else "GPU",
        offload=offload,
        exchange_s=exchange_s,
        resident=resident,
        resident_bytes=resident_bytes,
        frozen_bytes=frozen_bytes,
        activation_bytes=activation_bytes,
        assumptions=assume,
    )


def _way(num_gpus: int, tokens_per_s: float, train_tokens: float, price: float | None) -> Way:
    seconds = train_tokens / tokens_per_s
    dollars = None if price is None else num_gpus * price * seconds / 3600
    return Way(num_gpus=num_gpus, tokens_per_s=tokens_per_s, seconds=seconds, dollars=dollars)


def gradient_exchange_s(
    machine: Machine, num_trained: int, num_gpus: int, assume: Assumptions
) -> float:
    """Return the time of a ring all-reduce over the link, with nothing hidden behind compute."""
    if num_gpus == 1:
        return 0.0
    gradient_bytes = num_trained * assume.gradient_bytes_per_parameter
    return 2 * (num_gpus - 1) / num_gpus * gradient_bytes / machine.both_ways_bytes_s


def checkpointed_activation_bytes(plan: Plan, hidden_size: int, assume: Assumptions) -> int:
    """Return one sequence's activations on a GPU: every block's input, and one block's inside."""
    bytes_per_unit = 2 * len(plan.blocks) + assume.inside_bytes_per_unit
    return plan.job.seq_len * hidden_size * bytes_per_unit


def fewest_gpus(
    plan: Plan,
    machine: Machine,
    num_parameters: int,
    resident_bytes: int,
    activation_bytes: int,
    assume: Assumptions,
) -> int | None:
    """Return how many GPUs hold the model without offloading; None if no number does."""
    usable = assume.usable_share * machine.device_memory_bytes - activation_bytes
    if resident_bytes <= usable:
        return 1
    # From two GPUs on, whole blocks are gathered beside the shard.
    block_bytes = 2 * num_parameters / max(1, len(plan.blocks))
    for_shard = usable - assume.gathered_blocks * block_bytes
    if for_shard <= 0:
        return None
    fewest = max(2, math.ceil(resident_bytes / for_shard))
    return fewest if fewest <= _MOST_GPUS else None


def assumption_sentences(comparison: Comparison) -> list[str]:
    """Return what the figures take for granted, a sentence each."""
    assume, device = comparison.assumptions, comparison.device
    link = " (NVLink); over PCIe alone they are slower" if device == "GPU" else ""
    sentences = [
        f"Without offloading: {_resident_words(comparison)}, sharded over the {device}s; "
        f"each works on one sequence at a time with checkpointing "
        f"({format_bytes(comparison.activation_bytes)}) and uses {assume.usable_share:.0%} of its "
        "memory.",
        f"A lone {device} computes as fast as this plan's compute lane; sharded ones reach "
        f"{assume.sharded_efficiency:.0%} of that each, given a fast link between them{link}.",
    ]
    if comparison.offload.num_gpus > 1:
        sentences.append(
            f"Offloaded machines train data parallel: a step is {comparison.offload.num_gpus} "
            f"times as many tokens, and gradients are exchanged over the link once a step in "
            f"{comparison.exchange_s:.2f} s, with nothing hidden."
        )
    if comparison.price_per_hour is not None:
        whole = "A GPU with its share of the machine" if device == "GPU" else "A machine"
        sentences.append(
            f"{whole} costs ${comparison.price_per_hour:,.2f} an hour, offloaded or not."
        )
    else:
        sentences.append("No price is known for this machine: --price-per-hour gives one.")
    return sentences


def _resident_words(comparison: Comparison) -> str:
    each = comparison.assumptions.resident_bytes_per_parameter
    total = format_bytes(comparison.resident_bytes)
    if not comparison.frozen_bytes:
        return (
            f"{each} bytes a parameter (bf16 weight and gradient, fp32 master and moments: {total})"
        )
    return (
        f"{format_bytes(comparison.frozen_bytes)} of frozen weights, and {each} bytes for each "
        f"parameter that is trained ({total} in all)"
    )


def verdict_sentences(comparison: Comparison) -> list[str]:
    """Return which way to take, in words."""
    offload, resident, device = comparison.offload, comparison.resident, comparison.device
    limit_days = comparison.assumptions.wrong_tool_days
    sentences = []
    if resident is None:
        sentences.append(
            f"No number of these {device}s holds the model without offloading: one sequence and "
            f"the gathered blocks are more than a {device}'s memory."
        )
    elif resident.num_gpus == 1:
        sentences.append(
            f"One {device} holds the model without offloading. Offloading then only frees memory, "
            "for longer sequences or larger batches."
        )
    else:
        sentences.append(_against(comparison, resident))
    if offload.days > limit_days:
        took = format_duration(offload.seconds)
        if _is_as_slow_without(comparison):
            which = "One such {} is" if offload.num_gpus == 1 else "So few {}s are"
            sentences.append(
                f"{which.format(device)} too slow for so many tokens: {took}, with offloading or "
                f"without, is more than {limit_days:g} days; {_instead(comparison)}."
            )
        else:
            sentences.append(
                f"Offloading is the wrong tool for this: {took} is more than {limit_days:g} days. "
                f"{_why(comparison)}; {_instead(comparison)}."
            )
    return sentences


def _is_as_slow_without(comparison: Comparison) -> bool:
    """Whether one device holds the model, and is too slow without offloading as well."""
    offload, resident = comparison.offload, comparison.resident
    if resident is None or resident.num_gpus > 1:
        return False
    each_s = offload.num_gpus * offload.seconds
    is_slow = resident.days > offload.num_gpus * comparison.assumptions.wrong_tool_days
    return is_slow and each_s <= _EQUAL * resident.seconds


def _why(comparison: Comparison) -> str:
    if comparison.train_tokens >= comparison.assumptions.pre_training_tokens:
        return "So many tokens are large-scale pre-training"
    are_slow = "This machine is" if comparison.offload.num_gpus == 1 else "These machines are"
    return f"{are_slow} slow for so many tokens"


def _instead(comparison: Comparison) -> str:
    resident, assume = comparison.resident, comparison.assumptions
    device = comparison.device
    if resident is None:
        return f"this needs {device}s with more memory, and many of them"
    limit_days = assume.wrong_tool_days
    if resident.days <= limit_days:
        takes = "takes" if resident.num_gpus == 1 else "take"
        without = "without offloading" if resident.num_gpus == 1 else "that hold the model"
        holders = _count(resident.num_gpus, device)
        return f"{holders} {without} {takes} {format_duration(resident.seconds)}"
    enough = resident.num_gpus * resident.days / limit_days
    if resident.num_gpus == 1:  # several are not as fast each as the lone one
        enough /= assume.sharded_efficiency
    holders = _count(math.ceil(enough), device)
    return f"{holders} that hold the model would end within {limit_days:g} days"


def _against(comparison: Comparison, resident: Way) -> str:
    offload, device = comparison.offload, comparison.device
    speed = offload.seconds / resident.seconds
    time = (
        f"takes {speed:.1f} times as long as"
        if speed > _EQUAL
        else f"takes {1 / speed:.1f} times less time than"
        if speed < 0.95
        else "takes as long as"
    )
    those = f"the {_count(resident.num_gpus, device)} that hold the model"
    text = f"Offloading on {_count(offload.num_gpus, device)} {time} {those}"
    if offload.dollars is None or resident.dollars is None or resident.dollars == 0:
        return f"{text}."
    times = offload.dollars / resident.dollars
    if abs(times - 1) < 0.02:
        return f"{text}, and costs the same."
    if times > 2:
        return f"{text}, and costs {times:.{1 if times < 10 else 0}f} times as much."
    return f"{text}, and costs {abs(times - 1):.0%} {'less' if times < 1 else 'more'}."


def _count(count: int, device: Device) -> str:
    return f"one {device}" if count == 1 else f"{count} {device}s"


def format_duration(seconds: float) -> str:
    """Return a time as people say it: 42 s, 12.5 min, 7.2 hours, 3.4 days, 2.1 years."""
    for limit, size, unit in (
        (120, 1, "s"),
        (7200, 60, "min"),
        (2 * _DAY_S, 3600, "hours"),
        (1000 * _DAY_S, _DAY_S, "days"),
    ):
        if seconds < limit:
            return f"{seconds / size:,.{0 if size == 1 else 1}f} {unit}"
    return f"{seconds / (365.25 * _DAY_S):,.1f} years"


def format_tokens(tokens: float) -> str:
    """Return a number of tokens as people write it: 32768, 250 M, 1.5 B, 15 T."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if tokens >= size:
            return f"{tokens / size:,.4g}{unit}"
    return f"{tokens:.0f}"
