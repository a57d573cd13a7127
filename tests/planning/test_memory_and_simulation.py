"""Bytes and steps of placements: the counts against each other, the lanes against their rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GIB, H200, jobs, machines, specs, tiny_spec

from outcore.errors import DoesNotFit
from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec, model_spec
from outcore.planning import held_writes
from outcore.planning.choice_table import ChoiceTable
from outcore.planning.choices import TIERS, Choice, Choices
from outcore.planning.cost import DISK_UPDATE_SHARE, Costs
from outcore.planning.loss_chunks import chunk_rows
from outcore.planning.memory import budgets_of, totals
from outcore.planning.micro_batch import pick_micro_batch
from outcore.planning.plan import LANES, Budgets, Clipping, Job, Plan
from outcore.planning.search import fits, fitting_choices, make_plan, plan_of
from outcore.planning.state_bytes import StateBytes

JOB = Job(tokens=32_768, seq_len=2048)


def plan_for(choice: Choice, job: Job = JOB, machine: Machine = H200) -> Plan:
    spec = model_spec("qwen2.5-3b")
    return plan_of(spec, machine, job, choice.placement(len(spec.blocks), 4))


@settings(max_examples=40, deadline=None)
@given(specs(), machines(), jobs(), st.data())
def test_quick_counts_are_the_full_counts(
    spec: ModelSpec, machine: Machine, job: Job, data: st.DataObject
) -> None:
    table = ChoiceTable(spec, machine, job, pick_micro_batch(job.sequences, job.seq_len))
    fitting = fitting_choices(table, budgets_of(machine, job.budgets))
    if not len(fitting):
        return
    choice = fitting[data.draw(st.integers(0, len(fitting) - 1))]
    quick = table.bytes_of(Choices.of([choice]))
    placement = choice.placement(table.num_blocks, table.micro_batch)
    full = totals(table.memory.tiers(placement))
    for index, tier in enumerate(TIERS):
        assert quick[index][0] == pytest.approx(full[tier], rel=1e-6, abs=100)


@settings(max_examples=40, deadline=None)
@given(specs(), machines(), jobs(), st.data())
def test_the_lower_bound_is_not_above_the_simulation(
    spec: ModelSpec, machine: Machine, job: Job, data: st.DataObject
) -> None:
    table = ChoiceTable(spec, machine, job, pick_micro_batch(job.sequences, job.seq_len))
    fitting = fitting_choices(table, budgets_of(machine, job.budgets))
    if not len(fitting):
        return
    choice = fitting[data.draw(st.integers(0, len(fitting) - 1))]
    least = table.least_s(Choices.of([choice]))[0]
    assert least <= table.simulate(choice).step_s * (1 + 1e-9)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_the_lower_bound_knows_what_is_still_in_slots(num_slots: int) -> None:
    """Of the weights on disk, a backward does not read the ones that the forward used last."""
    machine = replace(H200, disk_read_bytes_s=1e8)
    job = replace(JOB, clipping="two-pass")
    table = ChoiceTable(model_spec("qwen2.5-3b"), machine, job, 4)
    for num_blocks in range(1, 6):
        choice = Choice(num_slots=num_slots, last_disk_weights=num_blocks)
        simulated = table.simulate(choice)
        least = table.least_s(Choices.of([choice]))[0]
        assert 0.9 * simulated.busy_s["disk read"] < least <= simulated.step_s


@pytest.mark.parametrize(("clipping", "num_visits"), [("two-pass", 4), ("none", 4), ("none", 5)])
def test_the_lower_bound_knows_that_host_and_device_update_an_embedding_together(
    clipping: Clipping, num_visits: int
) -> None:
    """Of its state a part lodges, and nothing hides the update of either part."""
    spec = tiny_spec(num_blocks=8, vocabulary=150_000)
    job = Job(tokens=64, seq_len=64, clipping=clipping)
    table = ChoiceTable(spec, replace(H200, device_memory_bytes_s=200e9), job, 1)
    choice = Choice(first_device_weights=8, first_device_state=8, num_visits=num_visits)
    least = table.least_s(Choices.of([choice]))[0]
    assert least <= table.simulate(choice).step_s * (1 + 1e-9)


def test_a_lane_does_one_thing_at_a_time() -> None:
    clippings: tuple[Clipping, ...] = ("waiting", "two-pass", "none")
    for clipping in clippings:
        plan = plan_for(Choice(num_visits=3, last_kept=4), replace(JOB, clipping=clipping))
        for lane in LANES:
            spans = [s for s in plan.prediction.timeline if s.lane == lane]
            for earlier, later in pairwise(spans):
                assert earlier.end_s <= later.start_s + 1e-9
        assert {s.lane for s in plan.prediction.timeline} == set(LANES[:4])
        assert max(s.end_s for s in plan.prediction.timeline) <= plan.prediction.step_s + 1e-9


def test_a_second_pass_costs_a_forward_and_a_backward() -> None:
    clippings: tuple[Clipping, ...] = ("two-pass", "none")
    two_pass, none = (
        plan_for(Choice(num_visits=3), replace(JOB, clipping=clipping)) for clipping in clippings
    )
    assert two_pass.peak_bytes == none.peak_bytes
    assert two_pass.prediction.busy_s["compute"] == pytest.approx(
        2 * none.prediction.busy_s["compute"], rel=0.05
    )
    for lane in ("host cores", "to host"):  # gradients leave once, and are used once
        assert two_pass.prediction.busy_s[lane] == pytest.approx(none.prediction.busy_s[lane])
    assert two_pass.prediction.step_s > 1.5 * none.prediction.step_s


def test_updates_that_wait_for_clipping_cost_time() -> None:
    clippings: tuple[Clipping, ...] = ("waiting", "none")
    waiting, passing = (
        plan_for(Choice(), replace(JOB, clipping=clipping)).prediction for clipping in clippings
    )
    assert waiting.step_s > passing.step_s
    assert waiting.binding_lane == "host cores"
    assert waiting.busy_s["host cores"] == pytest.approx(passing.busy_s["host cores"], rel=0.2)


def test_one_slot_hides_no_fetch() -> None:
    one, two = (plan_for(Choice(num_slots=n)).prediction for n in (1, 2))
    assert one.step_s > two.step_s


def test_each_block_is_fetched_once_a_pass() -> None:
    spec = model_spec("qwen2.5-3b")
    fetches = [
        s.name
        for s in plan_for(Choice()).prediction.timeline
        if s.lane == "to device" and s.name.startswith("weights")
    ]
    # The last three are still in their slots when the backward begins.
    assert len(fetches) == 2 * len(spec.blocks) - 3


def test_resident_weights_are_not_fetched() -> None:
    plan = plan_for(Choice(first_device_weights=36, first_device_state=36, edge_state=0))
    assert plan.prediction.busy_s["to device"] == 0
    assert plan.prediction.busy_s["host cores"] == 0
    assert plan.tier_bytes("host") == 0


def test_state_on_disk_moves_at_the_disks_pace() -> None:
    spec = model_spec("qwen2.5-3b")
    all_disk = Choice(last_disk_state=36)
    plan = plan_for(all_disk)
    written = sum(b.trainable_numel for b in spec.blocks) * 10
    on_disk = plan.peak_bytes["disk"]["optimizer state"]
    assert written <= on_disk <= written + 36 * 3 * 4096  # each tensor ends its last page
    assert plan.prediction.busy_s["disk write"] == pytest.approx(
        written / (DISK_UPDATE_SHARE * H200.disk_both_ways_bytes_s), rel=0.02
    )
    assert plan.prediction.step_s >= plan.prediction.busy_s["disk write"]
    assert plan.prediction.binding_lane in ("disk read", "disk write")
    assert 0 < plan.peak_bytes["host"]["disk staging"] < 2e9


def test_offloaded_inputs_leave_the_device() -> None:
    here, there = plan_for(Choice()), plan_for(Choice(offloads_inputs=1))
    saved = here.tier_bytes("device") - there.tier_bytes("device")
    assert saved == 33 * 32_768 * 2048 * 2  # of 36, three are on the device at a time
    assert there.peak_bytes["host"]["block inputs"] == 36 * 32_768 * 2048 * 2


@pytest.mark.parametrize(
    ("state_format", "traffic"), [("fp32", 26), ("compact", 12.03125), ("minimal", 10.03125)]
)
def test_traffic_of_an_update(state_format: str, traffic: float) -> None:
    job = Job(tokens=1, seq_len=1, state_format=state_format)  # type: ignore[arg-type]
    assert StateBytes.of(job).update_traffic == traffic


def test_fp32_has_no_remainder() -> None:
    sizes = StateBytes.of(Job(tokens=1, seq_len=1, dtype="fp32"))
    assert (sizes.weight, sizes.state, sizes.gradient) == (4, 8, 4)


def test_fp32_halves_the_products_of_a_gpu_but_not_of_a_cpu() -> None:
    """A CPU is measured in fp32, which it computes in."""
    spec, slow = tiny_spec(num_blocks=2), {"matmul_flops_s": 1e10}
    for name, factor in (("NVIDIA H200", 2), ("CPU: any", 1)):
        machine = replace(H200, device_name=name, **slow)
        bf16, fp32 = (
            Costs(spec, machine, replace(JOB, dtype=dtype), 4).blocks[0].forward_s
            for dtype in ("bf16", "fp32")
        )
        assert fp32 == pytest.approx(factor * bf16, rel=0.01)


def test_budgets_leave_room_for_fragments_and_the_process() -> None:
    given_ = budgets_of(H200, Budgets(device_bytes=10**10, host_bytes=500, disk_bytes=20))
    assert given_ == {"device": 97 * 10**8, "host": 500, "disk": 20}
    small = Budgets(device_bytes=513 << 20)
    assert budgets_of(H200, small)["device"] == 433 << 20  # pages that the allocator breaks off
    free = budgets_of(H200, Budgets())
    assert free["device"] < H200.device_memory_bytes
    assert free["host"] < H200.host_memory_bytes
    assert budgets_of(replace(H200, disk_read_bytes_s=0.0), Budgets())["disk"] == 0


def test_a_machine_without_a_disk_gets_nothing_there() -> None:
    machine = replace(H200, disk_bytes=0)
    table = ChoiceTable(tiny_spec(), machine, JOB, 4)
    fitting = fitting_choices(table, budgets_of(machine, JOB.budgets))
    assert not fitting.last_disk_state.any()
    assert not fitting.last_disk_weights.any()


@pytest.mark.parametrize(
    ("num_rows", "vocabulary", "hidden_size", "rows"),
    [
        (32_768, 152_064, 3584, 2048),  # 5 * 2**26 logits at most
        (32_704, 152_064, 3584, 2048),  # 511 * 64: equal ones would be small
        (8192, 49_152, 576, 512),  # no more than the head
        (768, 14, 128, 768),  # but some
        (1, 97, 8, 64),
    ],
)
def test_chunks_of_logits(num_rows: int, vocabulary: int, hidden_size: int, rows: int) -> None:
    assert chunk_rows(num_rows, vocabulary, hidden_size) == rows


def test_sequences_of_several_documents_take_masks() -> None:
    """On a GPU: one for the batch, and one in the type of the scores for a micro-batch."""
    plain, masked = (plan_for(Choice(), replace(JOB, is_masked=m)) for m in (False, True))
    whole = 32_768 * 2048
    at_once = 4 * 2048 * 2 * (2048 + 2 * (16 - 2) * 128)  # with keys and values for each head
    more = masked.tier_bytes("device") - plain.tier_bytes("device")
    assert whole <= more <= whole + at_once  # the loss may take more than a block
    assert masked.tier_bytes("host") == plain.tier_bytes("host")


def test_a_job_is_refused_for_its_masks() -> None:
    machine = replace(H200, device_name="CPU: any")
    spec = model_spec("smollm2-135m")
    job = Job(tokens=16_384, seq_len=8192, dtype="fp32")
    low, high = 0, 8 * GIB
    while high - low > 1 << 20:  # the least budget that fits without
        middle = (low + high) // 2
        is_enough = fits(spec, machine, replace(job, budgets=Budgets(device_bytes=middle)))
        low, high = (low, middle) if is_enough else (middle, high)
    with_masks = replace(job, is_masked=True, budgets=Budgets(device_bytes=high))
    assert not fits(spec, machine, with_masks)
    with pytest.raises(DoesNotFit, match="device needs"):
        make_plan(spec, machine, with_masks)


def test_a_kept_block_needs_no_second_graph_on_a_cpu() -> None:
    machine = replace(H200, device_name="CPU: any")
    memory = ChoiceTable(tiny_spec(vocabulary=64), machine, replace(JOB, dtype="fp32"), 4).memory
    recomputed = memory.working_bytes([False] * 4)
    graph = memory.kept_bytes(0) * 4 * 2048 / 32_768  # of a micro-batch
    for keeps in ([True] * 4, [False, False, False, True]):
        assert recomputed - memory.working_bytes(keeps) == pytest.approx(graph)
    # A first block that keeps still has its graph while those after it are computed again.
    assert memory.working_bytes([True, False, False, False]) == recomputed


def test_quick_counts_on_a_cpu_follow_what_is_kept() -> None:
    machine = replace(H200, device_name="CPU: any")
    table = ChoiceTable(tiny_spec(), machine, replace(JOB, is_masked=True), 4)
    for kept in range(5):
        choice = Choice(last_kept=kept)
        full = totals(table.memory.tiers(choice.placement(4, 4)))
        assert table.bytes_of(Choices.of([choice]))[0][0] == pytest.approx(full["device"], abs=100)


def test_a_disk_writes_while_the_backward_runs() -> None:
    """Gradients that wait leave memory: a step takes less than its updates and a backward."""
    spec, job = model_spec("qwen2.5-3b"), replace(JOB, clipping="waiting")
    choice = Choice(last_disk_state=len(spec.blocks), edge_state=0)
    plan = plan_for(choice, job)
    with patch.object(held_writes, "held_share", lambda _: 0.0):
        without = plan_for(choice, job)
    on_disk = sum(block.trainable_numel for block in spec.blocks) * StateBytes.of(job).state
    updates_s = on_disk / (DISK_UPDATE_SHARE * H200.disk_both_ways_bytes_s)
    backward_s = without.prediction.step_s - updates_s
    saved_s = without.prediction.step_s - plan.prediction.step_s
    assert 0.3 * backward_s < saved_s < backward_s
    assert plan.prediction.busy_s["disk read"] < without.prediction.busy_s["disk read"]


@pytest.mark.parametrize("num_parameters", [400e6, 500e6, 650e6])
def test_a_disk_of_which_no_writing_is_known_holds_nothing(num_parameters: float) -> None:
    """Pieces are fractions: what rounding leaves of the last one is held no more than the rest."""
    spec, machine = model_spec("qwen2.5-3b"), replace(H200, disk_write_bytes_s=0.0)
    block = replace(spec.blocks[0], trainable_numel=int(num_parameters))
    spec = replace(spec, blocks=(block,) * 12)
    job = replace(JOB, clipping="waiting")
    for last in range(1, 13):
        choice = Choice(last_disk_state=last, edge_state=0)
        placement = choice.placement(len(spec.blocks), 4)
        assert plan_of(spec, machine, job, placement).prediction.step_s > 0


def test_the_bound_of_frozen_last_blocks_on_disk() -> None:
    """The last block that is trained decides what is held, not the last one."""
    spec, job = model_spec("qwen2.5-3b"), replace(JOB, clipping="waiting")
    machine = replace(H200, disk_read_bytes_s=45e9, disk_both_ways_bytes_s=27e6)
    trained = spec.blocks[0]
    frozen = replace(trained, trainable_numel=0, trainable_parameters=0)
    spec = replace(spec, blocks=(*[trained] * 7, frozen, frozen))
    table = ChoiceTable(spec, machine, job, 4)
    choice = Choice(last_disk_weights=2, last_disk_state=9, edge_state=0)
    bound = table.least_s(Choices.of([choice]))[0]
    assert bound <= table.simulate(choice).step_s * (1 + 1e-9)
