"""The plan in words and tables."""

from dataclasses import replace

import pytest
from handmade_plans import GIB, make_machine, make_plan
from rich.console import Console, RenderableType

from outcore.planning.plan import BlockPlan, Clipping, Job, Plan
from outcore.planning.smaller_budget import SmallerBudget, next_smaller_bytes
from outcore.views import words
from outcore.views.explain import explain


def shown(renderable: RenderableType, width: int = 100) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def with_prediction(plan: Plan, **changes: object) -> Plan:
    return replace(plan, prediction=replace(plan.prediction, **changes))  # type: ignore[arg-type]


def test_equal_neighbours_are_one_run() -> None:
    sentences = [run.sentence() for run in words.block_runs(make_plan())]
    assert sentences == [
        "blocks 0-1: weights device, state device, recompute",
        "blocks 2-21: weights host, state host, recompute",
        "blocks 22-27: weights host, state host, keep",
    ]


def test_runs_cover_every_block_once_and_a_lone_one_is_singular() -> None:
    on_disk = BlockPlan(weights="disk", state="disk", activations="offload")
    on_host = replace(on_disk, weights="host")
    runs = words.block_runs(make_plan(blocks=(on_disk, on_host, on_disk, on_disk)))
    assert [(run.first, run.last) for run in runs] == [(0, 0), (1, 1), (2, 3)]
    assert runs[0].label == "block 0"
    assert words.block_runs(make_plan(blocks=())) == []


@pytest.mark.parametrize(
    ("state", "home"), [("device", "device"), ("host", "host"), ("disk", "host")]
)
def test_gradients_that_wait_wait_with_the_state(state: str, home: str) -> None:
    block = BlockPlan(weights="host", state=state, activations="keep")  # type: ignore[arg-type]
    plan = make_plan(blocks=(block,), job=Job(tokens=8, seq_len=4))
    assert words.home_rows(plan)[1].gradients == home
    clippings: tuple[Clipping, ...] = ("two-pass", "none")
    for clipping in clippings:
        passing = replace(plan, job=replace(plan.job, clipping=clipping))
        assert words.home_rows(passing)[1].gradients == "used at once"


def test_budgets_are_the_askers_then_the_machines() -> None:
    plan = make_plan()
    assert words.budget_bytes(plan, None) == {"device": 24 * GIB}
    budgets = words.budget_bytes(plan, make_machine(disk_bytes=0))
    assert budgets == {"device": 24 * GIB, "host": 125 * GIB}


def test_the_table_has_every_fact() -> None:
    slower = with_prediction(make_plan(), step_s=4.92, tokens_per_s=6660.0)
    smaller = SmallerBudget(device_bytes=20 * GIB, plan=slower)
    text = shown(explain(make_plan(), machine=make_machine(), smaller=smaller))
    for fact in (
        "qwen2.5-7b on h200-pcie5: 32,768 tokens a step (16 × 2,048), bf16, fp32 state, clipping",
        "4.10 s a step, 7,992 tokens/s, 372 TFLOPS",
        "micro-batch 4 sequences, 3 slots",
        "blocks 2-21",
        "kept activations",
        "94% of 24.0 GiB",
        "78% of 125.0 GiB",
        "The binding lane is host cores",
        "the device waits 0.70 s (17%)",
        "from 45,000 tokens a step compute would bind, 1.4× as many",
        "With 20.0 GiB of device memory a step takes 4.92 s, 20% longer (6,660 tokens/s)",
    ):
        assert fact in " ".join(text.split()), fact


def test_a_slow_step_has_tokens_and_a_short_one_has_seconds() -> None:
    slow = with_prediction(make_plan(), step_s=3.11, tokens_per_s=0.3215)
    assert "0.322 tokens/s" in shown(explain(slow))
    short = with_prediction(make_plan(), step_s=0.0149, tokens_per_s=67.0, busy_s={"compute": 5e-3})
    text = shown(explain(short))
    assert "0.015 s a step, 67 tokens/s" in text
    assert "compute       0.005 " in text


def test_it_fits_80_columns() -> None:
    text = shown(explain(make_plan(), machine=make_machine()), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_what_is_over_budget_says_so() -> None:
    plan = make_plan(peak_bytes={"device": {"slots": 30 * GIB}})
    assert "125% of 24.0 GiB, over" in shown(explain(plan))
    assert "over budget" in words.memory_sentence("device", 30 * GIB, 24 * GIB)


def test_hostile_names_are_shown_not_obeyed() -> None:
    plan = make_plan(model="[red]x[/]\x1b[2J\u202e", peak_bytes={"host": {"[blink]": 1}})
    plan = with_prediction(plan, busy_s={"\x1b]0;lane": 1.0}, binding_lane="[bold")
    text = shown(explain(plan))
    assert "[red]x[/]" in text
    assert "[blink]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    ("lane", "busy_s", "hiding", "expected"),
    [
        ("compute", 4.1, 20_000, "does not wait for data"),
        ("compute", 3.0, 20_000, "waits 1.10 s a step (27%)"),
        ("disk read", 1.0, 99_000, "the disk is read for 0.00 s"),
    ],
)
def test_the_binding_lane_in_words(lane: str, busy_s: float, hiding: int, expected: str) -> None:
    plan = with_prediction(
        make_plan(), binding_lane=lane, busy_s={"compute": busy_s}, hiding_tokens=hiding
    )
    assert expected in words.binding_sentence(plan)


@pytest.mark.parametrize(
    ("lane", "hiding", "expected"),
    [
        ("to device", 65_536, "2.0× as many"),
        ("compute", 20_000, "at 20,000 tokens a step; this job is beyond"),
        ("compute", None, "No bandwidth wall"),
        ("disk read", None, "No number of tokens"),
    ],
)
def test_the_wall_in_words(lane: str, hiding: int | None, expected: str) -> None:
    plan = with_prediction(make_plan(), binding_lane=lane, hiding_tokens=hiding)
    assert expected in words.wall_sentence(plan)


def test_the_next_smaller_budget() -> None:
    plan = make_plan()  # 22.5 GiB at the peak
    assert next_smaller_bytes(plan, 24 * GIB) == 20 * GIB
    assert next_smaller_bytes(plan, 18 * GIB) == 16 * GIB
    assert next_smaller_bytes(make_plan(peak_bytes={}), 24 * GIB) == 20 * GIB
    assert next_smaller_bytes(make_plan(peak_bytes={}), None) is None
    assert next_smaller_bytes(make_plan(peak_bytes={"device": {"all": GIB}}), None) is None


def test_a_smaller_budget_that_costs_nothing_or_does_not_fit() -> None:
    plan = make_plan()
    assert "as long as now" in SmallerBudget(device_bytes=20 * GIB, plan=plan).sentence(plan)
    refused = SmallerBudget(device_bytes=2 * GIB, refusal="It needs 3.1 GiB.")
    assert refused.sentence(plan).endswith("does not fit. It needs 3.1 GiB.")


def test_a_step_of_no_time_divides_nothing_by_zero() -> None:
    plan = with_prediction(make_plan(), step_s=0.0)
    smaller = SmallerBudget(device_bytes=GIB, plan=plan)
    assert "0.00 s" in shown(explain(plan, smaller=smaller))
