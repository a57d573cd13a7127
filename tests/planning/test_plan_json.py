"""A plan survives JSON exactly, and what is not a plan is refused with the place of the mistake."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from handmade_plans import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.planning import plan_json
from outcore.planning.plan import LANES, BlockPlan, Budgets, Job, Plan, Prediction, Span
from outcore.planning.plan_json import plan_from_dict, plan_to_dict, read_plan

tiers = st.sampled_from(["device", "host", "disk"])
sizes = st.integers(0, 2**60)
reals = st.floats(0, 1e15)
texts = st.text(max_size=20)
spans = st.tuples(st.sampled_from(LANES), texts, reals, reals).map(
    lambda s: Span(lane=s[0], name=s[1], start_s=min(s[2:]), end_s=max(s[2:]))
)
budgets = st.builds(
    Budgets,
    device_bytes=st.none() | sizes,
    host_bytes=st.none() | sizes,
    disk_bytes=st.none() | sizes,
    disk_path=st.none() | texts,
)
jobs = st.builds(
    Job,
    tokens=st.integers(1, 2**40),
    seq_len=st.integers(1, 2**20),
    clipping=st.sampled_from(["waiting", "two-pass", "none"]),
    dtype=st.sampled_from(["bf16", "fp32"]),
    state_format=st.sampled_from(["fp32", "compact", "minimal"]),
    micro_batch=st.none() | st.integers(1, 999),
    budgets=budgets,
    objective=st.sampled_from(["speed", "memory"]),
)
blocks = st.builds(
    BlockPlan,
    weights=tiers,
    state=tiers,
    activations=st.sampled_from(["keep", "recompute", "offload"]),
)
predictions = st.builds(
    Prediction,
    step_s=reals,
    tokens_per_s=reals,
    tflops=reals,
    busy_s=st.dictionaries(st.sampled_from(LANES), reals),
    binding_lane=st.sampled_from(LANES),
    hiding_tokens=st.none() | sizes,
    timeline=st.lists(spans, max_size=5).map(tuple),
)
plans = st.builds(
    Plan,
    model=texts,
    machine=texts,
    job=jobs,
    blocks=st.lists(blocks, max_size=6).map(tuple),
    edge_state=tiers,
    micro_batch=st.integers(1, 999),
    num_slots=st.integers(0, 9),
    num_visits=st.integers(0, 9),
    peak_bytes=st.dictionaries(tiers, st.dictionaries(texts, sizes, max_size=4)),
    block_parameters=st.lists(sizes, max_size=6).map(tuple),
    hidden_size=st.none() | st.integers(1, 2**20),
    prediction=predictions,
)


@settings(max_examples=80, deadline=None)
@given(plan=plans)
def test_every_plan_comes_back_equal_from_text(plan: Plan) -> None:
    text = json.dumps(plan_to_dict(plan), allow_nan=False)
    back = plan_from_dict(json.loads(text))
    assert back == plan
    assert json.dumps(plan_to_dict(back)) == text


@pytest.mark.parametrize("kind", [Plan, Job, Budgets, BlockPlan, Prediction])
def test_every_field_is_checked_on_the_way_in(kind: type) -> None:
    """A field that is new in the values must be read back, too."""
    assert plan_json._CHECKS[kind].keys() == {field.name for field in dataclasses.fields(kind)}


def test_keys_beside_the_plan_are_left_to_others() -> None:
    plan = make_plan()
    assert plan_from_dict({**plan_to_dict(plan), "comparison": [1, 2]}) == plan


def test_what_has_a_default_may_be_absent() -> None:
    data = plan_to_dict(make_plan(job=Job(tokens=4, seq_len=2)))
    data["plan"]["job"] = {"tokens": 4, "seq_len": 2}
    assert plan_from_dict(data).job == Job(tokens=4, seq_len=2)


MISTAKES: list[tuple[list[Any], Any, str]] = [
    (["blocks", 3, "weights"], "tape", r"blocks\[3\].weights must be one of device, host, disk"),
    (["blocks", 0, "weights"], ["device"], "must be one of"),
    (["blocks", 0], "device", r"blocks\[0\] must be an object"),
    (["blocks"], {"0": 1}, "blocks must be a list"),
    (["peak_bytes", "tape"], {}, "a key of plan.peak_bytes must be one of"),
    (["peak_bytes", "host", "weights"], -1, "must be 0 to"),
    (["peak_bytes", "host", "weights"], 1.5, "must be a whole number, not 1.5"),
    (["peak_bytes", "host", "weights"], 2**80, "must be 0 to"),
    (["peak_bytes", "host"], 7, "must be an object"),
    (["job", "tokens"], 0, "job.tokens must be 1 to"),
    (["job", "tokens"], True, "must be a whole number, not True"),
    (["job", "clipping"], True, "must be one of waiting, two-pass, none"),
    (["job", "dtype"], "fp16", "one of bf16, fp32"),
    (["job", "budgets", "device_bytes"], "24GiB", "must be a whole number"),
    (["job", "budgets", "disk_path"], 5, "must be a text"),
    (["micro_batch"], None, "must be a whole number, not None"),
    (["model"], "x" * 5000, "5000 characters"),
    (["model"], None, "must be a text"),
    (["block_parameters"], [1, -1], r"block_parameters\[1\] must be 0 to"),
    (["hidden_size"], 0, "must be 1 to"),
    (["prediction", "step_s"], float("nan"), "must be finite"),
    (["prediction", "step_s"], float("inf"), "must be finite"),
    (["prediction", "step_s"], 10**400, "too large"),
    (["prediction", "step_s"], "4.1", "must be a number"),
    (["prediction", "hiding_tokens"], -5, "must be 0 to"),
    (["prediction", "timeline", 0], ["compute", "x", 2.0, 1.0], "before it starts"),
    (["prediction", "timeline", 0], ["compute", "x", 2.0], "must be .lane, name, start, end"),
    (["surprise"], 1, "unknown key 'surprise'"),
]


@pytest.mark.parametrize(("path", "value", "message"), MISTAKES)
def test_a_mistake_is_refused_where_it_is(path: list[Any], value: Any, message: str) -> None:
    data = copy.deepcopy(plan_to_dict(make_plan()))
    place = data["plan"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        plan_from_dict(data)


def test_what_is_missing_is_named() -> None:
    data = plan_to_dict(make_plan())
    del data["plan"]["prediction"]["step_s"]
    with pytest.raises(ValueError, match=r"plan\.prediction\.step_s is missing"):
        plan_from_dict(data)


@pytest.mark.parametrize(("clips", "clipping"), [(True, "waiting"), (False, "none")])
def test_version_1_is_read(clips: bool, clipping: str) -> None:
    data = plan_to_dict(make_plan())
    del data["plan"]["job"]["clipping"]
    data["plan"]["job"]["clips"] = clips
    assert plan_from_dict({**data, "version": 1}).job.clipping == clipping
    data["plan"]["job"]["clips"] = 1
    with pytest.raises(ValueError, match="clips must be true or false"):
        plan_from_dict({**data, "version": 1})


@pytest.mark.parametrize("version", [0, 3, "1", None, True, 1.0])
def test_another_version_is_refused(version: Any) -> None:
    with pytest.raises(ValueError, match="this Outcore reads versions 1 to 2"):
        plan_from_dict({**plan_to_dict(make_plan()), "version": version})


@pytest.mark.parametrize("data", [None, 3, [], "plan", {}, {"format": "outcore machine"}])
def test_what_is_no_plan_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="this is no plan"):
        plan_from_dict(data)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json"):
        read_plan(tmp_path / "plan.json")


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_to_dict(make_plan())))
    assert read_plan(tmp_path / "plan.json") == make_plan()
