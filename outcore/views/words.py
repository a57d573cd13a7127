"""What a plan says, in words and short lists: the one source of the table and of the page.

Pure: plans in, texts out. Names in a plan may come from a file that somebody else wrote; what is
shown goes through ``printable`` first.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from outcore.machine.machine import Machine
from outcore.planning.device_type import is_parted
from outcore.planning.plan import LANES, BlockPlan, Clipping, Plan
from outcore.units import format_bytes, format_seconds

TIERS = ("device", "host", "disk")
CLIPPING_WORDS: dict[Clipping, str] = {
    "waiting": "clipping",
    "two-pass": "clipping in two passes",
    "none": "no clipping",
}

_LANE_WORK = {
    "compute": "the device computes",
    "to device": "bytes are copied to the device",
    "to host": "bytes are copied to the host",
    "host cores": "the host updates its weights",
    "disk read": "the disk is read",
    "disk write": "the disk is written",
}


def printable(text: str) -> str:
    """Return the text with control, direction and unassigned characters replaced.

    A name must not move the cursor, reverse the line, or fail to be encoded.
    """
    shown = (
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter).startswith("C") else letter
        for letter in text
    )
    return "".join(shown)


@dataclass(frozen=True, kw_only=True)
class BlockRun:
    """Neighbouring blocks with the same plan."""

    first: int
    last: int
    block: BlockPlan

    @property
    def label(self) -> str:
        if self.first == self.last:
            return f"block {self.first}"
        return f"blocks {self.first}-{self.last}"

    def sentence(self) -> str:
        block = self.block
        return f"{self.label}: weights {block.weights}, state {block.state}, {block.activations}"


def block_runs(plan: Plan) -> list[BlockRun]:
    """Return the blocks in order, grouped where neighbours are equal."""
    runs: list[BlockRun] = []
    for index, block in enumerate(plan.blocks):
        if runs and runs[-1].block == block:
            runs[-1] = BlockRun(first=runs[-1].first, last=index, block=block)
        else:
            runs.append(BlockRun(first=index, last=index, block=block))
    return runs


@dataclass(frozen=True, kw_only=True)
class HomeRow:
    """A row of the table of homes."""

    label: str
    weights: str
    state: str
    gradients: str
    activations: str


def home_rows(plan: Plan) -> list[HomeRow]:
    """Return the homes of the edges, then of each run of blocks."""
    edges = HomeRow(
        label="edges",
        weights="device",
        state=plan.edge_state,
        gradients=_gradient_home(plan, plan.edge_state),
        activations="–",
    )
    return [
        edges,
        *(
            HomeRow(
                label=run.label,
                weights=run.block.weights,
                state=run.block.state,
                gradients=_gradient_home(plan, run.block.state),
                activations=run.block.activations,
            )
            for run in block_runs(plan)
        ),
    ]


def _gradient_home(plan: Plan, state: str) -> str:
    if not plan.job.gradients_wait:
        return "used at once"
    return "host" if state == "disk" else state


def budget_bytes(plan: Plan, machine: Machine | None) -> dict[str, int]:
    """Return the bytes that each tier may hold: as asked for, else what the machine has."""
    budgets = plan.job.budgets
    asked = {
        "device": budgets.device_bytes,
        "host": budgets.host_bytes,
        "disk": budgets.disk_bytes,
    }
    if machine is not None:
        has = {
            "device": machine.device_memory_bytes,
            "host": machine.host_memory_bytes,
            "disk": machine.disk_bytes,
        }
        if machine.is_unified and budgets.host_bytes is not None:  # of the same bytes
            has["device"] = min(has["device"], budgets.host_bytes)
            asked["device"] = min(has["device"], budgets.device_bytes or has["device"])
        if is_parted(machine) and budgets.device_bytes is not None:
            has["host"] = max(0, has["host"] - budgets.device_bytes)
        asked = {tier: has[tier] if size is None else size for tier, size in asked.items()}
    return {tier: size for tier, size in asked.items() if size}


@dataclass(frozen=True, kw_only=True)
class LaneUse:
    """How busy a lane is during the step."""

    lane: str
    busy_s: float
    share: float  # of the step
    binds: bool


def lane_uses(plan: Plan) -> list[LaneUse]:
    """Return the lanes in their usual order, the idle ones too, then any that are not known."""
    prediction = plan.prediction
    lanes = [*LANES, *(lane for lane in prediction.busy_s if lane not in LANES)]
    return [
        LaneUse(
            lane=lane,
            busy_s=prediction.busy_s.get(lane, 0.0),
            share=prediction.busy_s.get(lane, 0.0) / prediction.step_s if prediction.step_s else 0,
            binds=lane == prediction.binding_lane,
        )
        for lane in lanes
    ]


def job_sentence(plan: Plan) -> str:
    """Return what was asked for, in one line."""
    job = plan.job
    parts = [
        f"{job.tokens:,} tokens a step ({job.sequences} × {job.seq_len:,})",
        job.dtype,
        f"{job.state_format} state",
        CLIPPING_WORDS[job.clipping],
    ]
    if job.frozen_weights is not None:
        parts.insert(2, f"frozen weights in {job.frozen_weights}")
    if job.objective == "memory":
        parts.append("least memory")
    if job.checkpoints:
        parts.append(
            "checkpoints while training goes on"
            if plan.stages_checkpoints
            else "synchronous checkpoints (no host memory for a copy of the state)"
        )
    return ", ".join(parts)


def binding_sentence(plan: Plan) -> str:
    """Return which lane binds, and what that costs."""
    prediction = plan.prediction
    lane = prediction.binding_lane
    compute_s = prediction.busy_s.get("compute", 0.0)
    waits_s = max(0.0, prediction.step_s - compute_s)
    share = waits_s / prediction.step_s if prediction.step_s else 0.0
    if lane == "compute":
        if share < 0.02:
            return "The binding lane is compute: the device does not wait for data."
        return (
            f"The binding lane is compute; the device waits {format_seconds(waits_s)} s a step "
            f"({share:.0%})."
        )
    work = _LANE_WORK.get(lane, f"{printable(lane)} works")
    busy_s = prediction.busy_s.get(lane, 0.0)
    return (
        f"The binding lane is {printable(lane)}: {work} for {format_seconds(busy_s)} s of the "
        f"{format_seconds(prediction.step_s)} s, and the device waits {format_seconds(waits_s)} s "
        f"({share:.0%})."
    )


def wall_sentence(plan: Plan) -> str:
    """Return how many tokens a step move the bandwidth wall."""
    hiding, tokens = plan.prediction.hiding_tokens, plan.job.tokens
    if hiding is None:
        if plan.prediction.binding_lane == "compute":
            return "No bandwidth wall: compute binds at this size already."
        return "No number of tokens a step hides it: compute would not bind at any size."
    if tokens >= hiding:
        return f"The bandwidth wall is at {hiding:,} tokens a step; this job is beyond it."
    return (
        f"The bandwidth wall: from {hiding:,} tokens a step compute would bind, "
        f"{hiding / tokens:.1f}× as many as now."
    )


def memory_sentence(tier: str, used: int, budget: int | None) -> str:
    """Return a tier's peak against its budget."""
    if budget is None:
        return f"{tier}: {format_bytes(used)} at the peak"
    share = used / budget
    over = ", over budget" if used > budget else ""
    return f"{tier}: {format_bytes(used)} of {format_bytes(budget)} at the peak ({share:.0%}{over})"
