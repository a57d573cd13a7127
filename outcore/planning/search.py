"""From a model, a machine and a job to the plan.

All choices of a fixed grid are counted, those that fit are ordered by a lower bound of their step
time, and the most promising are simulated. Every choice brings as few blocks to disk and keeps as
many activations as its budgets allow. The simple policies that other systems use are always among
those that are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec
from outcore.planning.choice_table import ChoiceTable
from outcore.planning.choices import TIERS, Choice, Choices, Counts
from outcore.planning.cost import Costs, input_bytes
from outcore.planning.device_type import device_type
from outcore.planning.lanes import COMPUTE
from outcore.planning.memory import budgets_of
from outcore.planning.micro_batch import pick_micro_batch
from outcore.planning.placement import Placement, Units
from outcore.planning.plan import CHECKPOINT_STAGING, Job, Plan, Prediction
from outcore.planning.refusal import refuse
from outcore.planning.simulate import Simulated, simulate
from outcore.planning.step_size import MOST_TOKENS, too_many

SLOWER_FOR_CHECKPOINTS = 1.05  # for host memory in which a checkpoint waits to be written
SLOWER_FOR_MEMORY = 1.1  # objective="memory": the least device memory within this of the fastest
_MOST_SEQUENCES = 1 << 17  # looked at for the tokens that hide everything
_EQUAL = 0.005  # step times that differ by less are the same; then the plainer choice is taken
_WORK = 16_000  # blocks played while searching, at most; several steps each

Limits = dict[str, int]
Fits = Callable[[Counts], NDArray[np.bool_]]
Played = tuple[Choice, Simulated]


def make_plan(spec: ModelSpec, machine: Machine, job: Job) -> Plan:
    """Return the plan of least predicted step time, or of least device memory, that fits.

    Raises DoesNotFit, with what is missing and the nearest changes that fit, before anything is
    allocated. Of the numbers that are computed with, types and formats, nothing is changed.
    """
    plan = _search(spec, machine, replace(job, checkpoints=False))
    if plan is None:
        limits = budgets_of(machine, job.budgets)
        has_frozen = any(block.frozen_matrices for block in spec.blocks)
        needs = partial(_needs, spec, machine)
        raise refuse(job, machine, limits, needs, has_frozen_matrices=has_frozen)
    return _with_checkpoints(spec, machine, job, plan) if job.checkpoints else plan


def _search(spec: ModelSpec, machine: Machine, job: Job) -> Plan | None:
    table = _table(spec, machine, job)
    limits = budgets_of(machine, job.budgets)
    fitting = fitting_choices(table, limits)
    if not len(fitting):
        return None
    # A disk wears, and what fits without one does not need it.
    without_disk = fitting.where((fitting.last_disk_state == 0) & (fitting.last_disk_weights == 0))
    fitting = without_disk if len(without_disk) else fitting
    best = _fastest(table, fitting, _simple_fitting(table, limits))
    if job.objective == "memory":
        best = _leanest(table, fitting, limits, best)
    return _plan(spec, machine, job, table, best[0])


def _with_checkpoints(spec: ModelSpec, machine: Machine, job: Job, plain: Plan) -> Plan:
    """Return the plan with room for a copy of the state, where that costs next to nothing.

    ``plain``: the plan without. Training never waits for a copy that does not fit: checkpoints are
    then synchronous.
    """
    staging = _table(spec, machine, job).memory.checkpoint_staging_bytes
    tier = "device" if machine.is_unified else "host"
    if plain.tier_bytes(tier) + staging <= budgets_of(machine, job.budgets)[tier]:
        purposes = {**plain.peak_bytes.get(tier, {}), CHECKPOINT_STAGING: staging}
        return replace(plain, job=job, peak_bytes={**plain.peak_bytes, tier: purposes})
    staged = _search(spec, machine, job)
    most_s = SLOWER_FOR_CHECKPOINTS * plain.prediction.step_s
    if staged is not None and staged.prediction.step_s <= most_s:
        return staged
    return replace(plain, job=job)


def simple_plans(spec: ModelSpec, machine: Machine, job: Job) -> dict[str, Plan]:
    """Return the plans of the simple policies that fit, by name."""
    table = _table(spec, machine, job)
    limits = budgets_of(machine, job.budgets)
    return {
        name: _plan(spec, machine, job, table, choice)
        for name, choice in _simple_fitting(table, limits).items()
    }


def plan_of(spec: ModelSpec, machine: Machine, job: Job, placement: Placement) -> Plan:
    """Return the plan of a given placement, with its bytes and its prediction; fits or not."""
    table = ChoiceTable(spec, machine, job, placement.micro_batch)
    return _plan_of(spec, machine, job, table, placement)


def fits(spec: ModelSpec, machine: Machine, job: Job) -> bool:
    """Return whether some plan fits."""
    table = _table(spec, machine, replace(job, checkpoints=False))
    return bool(len(fitting_choices(table, budgets_of(machine, job.budgets))))


def _table(spec: ModelSpec, machine: Machine, job: Job) -> ChoiceTable:
    if job.sequences < 1:
        raise ValueError(
            f"a step of {job.tokens} tokens has no whole sequence of {job.seq_len} tokens"
        )
    if job.tokens > MOST_TOKENS:
        raise ValueError(f"a step has {job.tokens:,} tokens, {too_many()}")
    micro_batch = job.micro_batch or pick_micro_batch(
        job.sequences, job.seq_len, device_type=device_type(machine)
    )
    return ChoiceTable(spec, machine, job, min(micro_batch, job.sequences))


# --- which choices there are ----------------------------------------------------------------------


def fitting_choices(table: ChoiceTable, limits: Limits) -> Choices:
    """Return every choice of the grid that fits."""
    for slots in ([2, 3], [1]):  # one slot hides no fetch: only where two do not fit
        choices = filled(table, limits, slots)
        fit = _fit(table, choices, limits)
        if fit.any():
            break
    return choices.where(fit)


def _fit(table: ChoiceTable, choices: Choices, limits: Limits) -> NDArray[np.bool_]:
    device, host, disk = table.bytes_of(choices)
    return (device <= limits["device"]) & (host <= limits["host"]) & (disk <= limits["disk"])


def filled(table: ChoiceTable, limits: Limits, slots: list[int]) -> Choices:
    """Return the grid, each choice with as little on disk and as much kept as fits, if it can."""
    grid = _unified_grid if table.is_unified else _grid
    choices = table.capped_visits(grid(table, limits, slots)).distinct()
    n, zeros = table.num_blocks, np.zeros(len(choices), dtype=np.int64)
    if limits["disk"] and not table.is_unified:
        choices = choices.but(
            last_disk_state=_least_that_fits(
                table,
                n - choices.first_device_state,
                lambda x: table.bytes_of(choices.but(last_disk_state=x))[1] <= limits["host"],
            )
        )
        choices = choices.but(
            last_disk_weights=_least_that_fits(
                table,
                np.minimum(choices.last_disk_state, n - choices.first_device_weights),
                lambda x: table.bytes_of(choices.but(last_disk_weights=x))[1] <= limits["host"],
            )
        )
        choices = table.capped_visits(choices)
    return choices.but(
        last_kept=table.extreme(
            zeros,
            zeros + n,
            lambda x: table.bytes_of(choices.but(last_kept=x))[0] <= limits["device"],
            largest=True,
        )
    )


def _least_that_fits(table: ChoiceTable, most: Counts, fits: Fits) -> Counts:
    """Return the least counts that fit. None on disk is looked at apart: it needs no staging."""
    zeros = np.zeros_like(most)
    return np.where(fits(zeros), 0, table.extreme(zeros, most, fits, largest=False))


def _grid(table: ChoiceTable, limits: Limits, slots: list[int]) -> Choices:
    n, urgent = table.num_blocks, table.num_urgent()
    choices = Choices.product(
        first_device_state=_spread(n, 32),
        first_device_weights=_spread(n, 4),
        edge_state=[0, 1],  # never on disk: small, and their gradients come in parts
        offloads_inputs=[0, 1],
        num_slots=slots,
        num_visits=sorted({0, 3, *(3 + x for x in _spread(urgent - 1, 4))}),
    )
    with_state = choices.but(first_device_weights=choices.first_device_state)
    # State on the device is updated there: with weights elsewhere these would come and go.
    choices = choices.where(choices.first_device_weights >= choices.first_device_state)
    return _joined(choices, with_state)


def _unified_grid(table: ChoiceTable, limits: Limits, slots: list[int]) -> Choices:
    """One memory: nothing is copied between device and host, so only the disk is a choice."""
    n = table.num_blocks
    choices = Choices.product(
        last_disk_state=_spread(n, 64) if limits["disk"] else [0],
        edge_state=[0],
        num_slots=slots,
    )
    with_weights = choices.but(last_disk_weights=choices.last_disk_state)
    choices = _joined(choices, with_weights)
    return choices.but(
        first_device_state=n - choices.last_disk_state,
        first_device_weights=n - choices.last_disk_weights,
    ).distinct()


def _spread(most: int, count: int) -> list[int]:
    """Return at most about ``count`` numbers from 0 to ``most``, both ends among them."""
    if most <= 0:
        return [0]
    return sorted({0, min(1, most), *(round(most * i / count) for i in range(count + 1))})


def _joined(*parts: Choices) -> Choices:
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Choice.__dataclass_fields__
    }
    return Choices(**columns)


def _simple_fitting(table: ChoiceTable, limits: Limits) -> dict[str, Choice]:
    """Return the policies of other systems that fit, by name."""
    n = table.num_blocks
    device = TIERS.index("device")
    everything = Choice(first_device_weights=n, first_device_state=n, edge_state=device)
    policies = {
        "all device": everything,
        "all device, activations kept": Choice(
            first_device_weights=n, first_device_state=n, edge_state=device, last_kept=n
        ),
    }
    if not table.is_unified:
        policies |= {
            "all host": Choice(num_visits=3),
            "ZeRO-Offload": Choice(first_device_weights=n),
            "MegaTrain": Choice(num_slots=2),
        }
    names, choices = list(policies), Choices.of(list(policies.values()))
    tiers = table.bytes_of(choices)
    return {
        names[i]: choices[i]
        for i in range(len(choices))
        if all(tiers[t][i] <= limits[tier] for t, tier in enumerate(TIERS))
    }


def _needs(spec: ModelSpec, machine: Machine, job: Job) -> NDArray[np.int64]:
    """Return what each choice would take in each tier: one row a choice, in the order of TIERS."""
    job = replace(job, checkpoints=False)  # a plan is never refused for these
    table, limits = _table(spec, machine, job), budgets_of(machine, job.budgets)
    rows = [table.bytes_of(filled(table, limits, slots)) for slots in ([1], [2])]
    return np.concatenate([np.ceil(np.stack(row, axis=1)).astype(np.int64) for row in rows])


# --- which one is best ----------------------------------------------------------------------------


def _fastest(table: ChoiceTable, fitting: Choices, simple: dict[str, Choice]) -> Played:
    """Simulate by the order of the lower bound, until no bound is below the best."""
    played = [(choice, table.simulate(choice)) for choice in simple.values()]
    best = simple_best = min((p[1].step_s for p in played), default=float("inf"))
    least = table.least_s(fitting)
    kinds = list(_kinds(fitting, least))
    for kind in kinds:
        # Bounds that are equal to a thousandth are equal: then what takes less memory goes first.
        device = table.bytes_of(fitting.where(kind))[0]
        order = kind[np.lexsort((device, np.round(np.log(least[kind]), 3)))]
        for index in order[: max(12, _WORK // (table.num_blocks * len(kinds)))]:
            if least[index] >= best:
                continue
            choice = fitting[int(index)]
            played.append((choice, table.simulate(choice)))
            best = min(best, played[-1][1].step_s)
    near = [p for p in played if p[1].step_s <= min(best * (1 + _EQUAL), simple_best)]
    return min(near, key=lambda p: (*_plainness(p[0]), p[1].step_s))


def _kinds(choices: Choices, least: NDArray[np.float64]) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of choices of one kind, the most promising kind first.

    The bound sees some waits better than others: of each kind some are simulated.
    """
    uses_disk = (choices.last_disk_state > 0) | (choices.edge_state == TIERS.index("disk"))
    kinds = (
        4 * uses_disk
        + 2 * choices.offloads_inputs
        + (choices.edge_state == TIERS.index("device"))
        + 8 * (choices.num_slots == 3)
    )
    found = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    yield from sorted(found, key=lambda indices: float(least[indices].min()))


def _plainness(choice: Choice) -> tuple[bool, int, int]:
    """Less is plainer: no disk, no offloaded inputs, more slots."""
    uses_disk = choice.last_disk_state > 0 or TIERS[choice.edge_state] == "disk"
    return uses_disk, choice.offloads_inputs, -choice.num_slots


def _leanest(table: ChoiceTable, fitting: Choices, limits: Limits, fastest: Played) -> Played:
    """Return the choice of least device memory among those at most 1.1 times as slow."""
    most_s = SLOWER_FOR_MEMORY * fastest[1].step_s
    n = table.num_blocks
    fewer = _joined(
        *(fitting.but(last_kept=np.minimum(fitting.last_kept, kept)) for kept in _spread(n, 8)),
    )
    # Inputs that are kept no longer may wait on the host, which must have room for them.
    fewer = fewer.where(_fit(table, fewer, limits) & (table.least_s(fewer) <= most_s)).distinct()
    device, least = table.bytes_of(fewer)[0], table.bytes_of(Choices.of([fastest[0]]))[0]
    order = np.argsort(device, kind="stable")
    fewer = fewer.where(order[device[order] < least])

    def first(positions: range) -> tuple[int, Played] | None:
        for position in positions:
            choice = fewer[position]
            simulated = table.simulate(choice)
            if simulated.step_s <= most_s:
                return position, (choice, simulated)
        return None

    # Far more than can be simulated: one of several, and then those just before the first that is
    # fast enough.
    several = max(1, -(-len(fewer) // max(20, _WORK // (2 * n))))
    found = first(range(0, len(fewer), several))
    if found is None:
        return fastest
    before = first(range(max(0, found[0] - several + 1), found[0]))
    return (before or found)[1]


# --- the plan -------------------------------------------------------------------------------------


def _plan(spec: ModelSpec, machine: Machine, job: Job, table: ChoiceTable, choice: Choice) -> Plan:
    placement = choice.placement(table.num_blocks, table.micro_batch)
    return _plan_of(spec, machine, job, table, placement)


def _plan_of(
    spec: ModelSpec, machine: Machine, job: Job, table: ChoiceTable, placement: Placement
) -> Plan:
    inputs = tuple(input_bytes(block, job) for block in spec.blocks)
    simulated = simulate(
        table.costs,
        table.memory.units,
        placement,
        gradients_wait=job.gradients_wait,
        num_passes=job.num_passes,
        input_bytes=inputs,
        records=True,
    )
    tokens = job.sequences * job.seq_len
    flops = spec.step_flops(job.sequences, job.seq_len)
    return Plan(
        model=spec.name,
        machine=machine.name,
        job=job,
        blocks=placement.blocks,
        edge_state=placement.edge_state,
        micro_batch=placement.micro_batch,
        num_slots=placement.num_slots,
        num_visits=placement.num_visits,
        peak_bytes=table.memory.tiers(placement),
        block_parameters=tuple(block.parameters for block in spec.blocks),
        hidden_size=spec.hidden_size,
        largest_kept_bytes=table.memory.largest_kept_bytes(placement),
        prediction=Prediction(
            step_s=simulated.step_s,
            tokens_per_s=tokens / simulated.step_s,
            tflops=flops / simulated.step_s / 1e12,
            busy_s=simulated.busy_s,
            binding_lane=simulated.binding_lane,
            hiding_tokens=hiding_tokens(spec, machine, job, placement, table.memory.units),
            timeline=simulated.timeline,
        ),
    )


def hiding_tokens(
    spec: ModelSpec, machine: Machine, job: Job, placement: Placement, units: Units
) -> int | None:
    """Return the tokens a step from which compute binds, with the same placement; None: never."""

    def is_hidden(sequences: int) -> bool:
        size = job.micro_batch or pick_micro_batch(
            sequences, job.seq_len, device_type=device_type(machine)
        )
        longer = Job(
            tokens=sequences * job.seq_len,
            seq_len=job.seq_len,
            dtype=job.dtype,
            clipping=job.clipping,
            state_format=job.state_format,
            frozen_weights=job.frozen_weights,
        )
        costs = Costs(spec, machine, longer, min(size, sequences))
        inputs = tuple(input_bytes(block, longer) for block in spec.blocks)
        played = simulate(
            costs,
            units,
            placement,
            gradients_wait=job.gradients_wait,
            num_passes=job.num_passes,
            input_bytes=inputs,
            num_steps=2,
        )
        return played.binding_lane == COMPUTE

    high = 1
    while not is_hidden(high):
        high *= 2
        if high > _MOST_SEQUENCES:
            return None
    low = high // 2  # does not hide, or is 0
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        low, high = (low, middle) if is_hidden(middle) else (middle, high)
    return high * job.seq_len
