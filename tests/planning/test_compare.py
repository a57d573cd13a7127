"""Offload, or more GPUs: the arithmetic and the verdicts."""

from dataclasses import replace
from typing import Any

import pytest
from handmade_plans import GIB, make_machine, make_plan

from outcore.machine.machine import Machine
from outcore.planning.compare import (
    Assumptions,
    Comparison,
    assumption_sentences,
    compare,
    format_duration,
    format_tokens,
    verdict_sentences,
)

SEVEN_B = {"num_parameters": 7_600_000_000, "hidden_size": 3584}


def comparison(**changes: Any) -> Comparison:
    arguments: dict[str, Any] = {
        "plan": make_plan(),
        "machine": make_machine(device_memory_bytes=24 * GIB),
        **SEVEN_B,
        "train_tokens": 1e9,
    }
    return compare(**{**arguments, **changes})


def test_one_machine_takes_the_tokens_over_its_speed() -> None:
    offload = comparison().offload
    assert offload.seconds == pytest.approx(1e9 / (32768 / 4.1))
    assert offload.dollars == pytest.approx(offload.seconds / 3600 * 3.5)
    assert comparison(price_per_hour=7).offload.dollars == pytest.approx(2 * (offload.dollars or 0))


def test_two_machines_exchange_gradients_over_the_link() -> None:
    two = comparison(num_gpus=2)
    assert two.exchange_s == pytest.approx(2 * 7.6e9 / 50e9)
    assert two.offload.tokens_per_s == pytest.approx(2 * 32768 / (4.1 + two.exchange_s))
    assert comparison().exchange_s == 0
    assert any("exchanged over the link" in s for s in assumption_sentences(two))
    assert not any("exchanged" in s for s in assumption_sentences(comparison()))


def test_the_fewest_gpus_hold_it_and_one_less_does_not() -> None:
    result = comparison()
    assert result.resident is not None
    fewest = result.resident.num_gpus
    gathered = 2 * 2 * 7.6e9 / 28
    room = 0.9 * 24 * GIB - result.activation_bytes - gathered
    assert 16 * 7.6e9 / fewest <= room < 16 * 7.6e9 / (fewest - 1)
    assert result.activation_bytes == 2048 * 3584 * (2 * 28 + 34)
    assert result.resident.tokens_per_s == pytest.approx(fewest * 0.85 * 32768 / 3.4)


def test_a_frozen_base_is_weights_alone() -> None:
    """Under adapters no parameter of the base has a gradient, a master or moments."""
    frozen = {"num_frozen": 7_500_000_000, "frozen_bytes": 15_000_000_000}
    result = comparison(**frozen)
    assert result.resident_bytes == 16 * 100_000_000 + 15_000_000_000
    assert result.resident is not None
    assert result.resident.num_gpus == 1
    assert comparison(num_gpus=2, **frozen).exchange_s == pytest.approx(2 * 1e8 / 50e9)
    said = assumption_sentences(result)[0]
    assert "14.0 GiB of frozen weights, and 16 bytes for each parameter that is trained" in said
    assert "frozen" not in assumption_sentences(comparison())[0]


def test_gpus_that_hold_the_gradients_clip_them_in_one_pass() -> None:
    plan = make_plan()
    twice = replace(plan.prediction, busy_s={**plan.prediction.busy_s, "compute": 6.8})
    two_pass = replace(plan, job=replace(plan.job, clipping="two-pass"), prediction=twice)
    assert comparison(plan=two_pass).resident == comparison().resident


def test_a_model_that_one_gpu_holds() -> None:
    result = comparison(num_parameters=100_000_000)
    assert result.resident is not None
    assert result.resident.num_gpus == 1
    assert result.resident.tokens_per_s == pytest.approx(32768 / 3.4)  # nothing lost to sharding
    assert "One GPU holds the model" in verdict_sentences(result)[0]


def test_a_sequence_too_long_for_any_number_of_gpus() -> None:
    plan = make_plan()
    long = replace(plan, job=replace(plan.job, tokens=2**21, seq_len=2**21))
    result = comparison(plan=long)
    assert result.resident is None
    assert "No number of these GPUs" in verdict_sentences(result)[0]


def test_fine_tuning_is_answered_with_time_and_money() -> None:
    result = comparison(train_tokens=1e8)
    (verdict,) = verdict_sentences(result)
    assert result.resident is not None
    factor = result.offload.seconds / result.resident.seconds
    assert f"{factor:.1f} times as long as the {result.resident.num_gpus} GPUs" in verdict
    assert "more" in verdict or "less" in verdict


def test_pre_training_is_the_wrong_job_for_it() -> None:
    result = comparison(train_tokens=15e12)
    wrong = verdict_sentences(result)[-1]
    assert "wrong tool" in wrong
    assert "more than 30 days" in wrong
    assert result.resident is not None
    enough = int("".join(c for c in wrong.split("pre-training; ")[1].split(" GPUs")[0]))
    days = result.resident.days * result.resident.num_gpus / enough
    assert 29 < days <= 30
    patient = Assumptions(wrong_tool_days=1e9)
    assert len(verdict_sentences(comparison(train_tokens=15e12, assumptions=patient))) == 1


def test_few_tokens_on_a_slow_machine_are_no_pre_training() -> None:
    plan = make_plan()
    slow = replace(plan, prediction=replace(plan.prediction, step_s=400.0))
    result = comparison(plan=slow, train_tokens=3e8)
    assert result.resident is not None
    wrong = verdict_sentences(result)[-1]
    assert "42.4 days is more than 30 days. This machine is slow for so many tokens; " in wrong
    time = format_duration(result.resident.seconds)
    assert wrong.endswith(f"; {result.resident.num_gpus} GPUs that hold the model take {time}.")
    several = verdict_sentences(comparison(plan=slow, train_tokens=6e8, num_gpus=2))[-1]
    assert "These machines are slow for so many tokens; " in several
    many = verdict_sentences(comparison(plan=slow, train_tokens=1e10))[-1]
    assert "So many tokens are large-scale pre-training; " in many


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_device_that_is_as_slow_without_offloading_is_blamed_itself(num_gpus: int) -> None:
    plan = make_plan()
    slow = replace(plan.prediction, step_s=400.0, busy_s={"compute": 390.0})
    small = {"num_parameters": 10_000_000, "num_gpus": num_gpus, "train_tokens": num_gpus * 3e8}
    result = comparison(plan=replace(plan, prediction=slow), **small)
    holds, verdict = verdict_sentences(result)
    assert holds.startswith("One GPU holds the model")
    took = format_duration(result.offload.seconds)
    which = "One such GPU is" if num_gpus == 1 else "So few GPUs are"
    assert verdict.startswith(
        f"{which} too slow for so many tokens: {took}, with offloading or without, is more than 30 "
        "days; "
    )
    assert verdict.endswith("GPUs that hold the model would end within 30 days.")
    # Offloading that takes longer than the device alone would is still the wrong tool.
    waiting = replace(slow, busy_s={"compute": 300.0})
    result = comparison(plan=replace(plan, prediction=waiting), **small)
    assert "wrong tool" in verdict_sentences(result)[-1]


def test_so_many_gpus_end_in_time_by_the_speed_that_they_are_said_to_have() -> None:
    """One holds the model and would take 109 days; of several each has 85% of its speed."""
    tokens_a_day = 86_400 * 32768 / 3.4
    machine = make_machine(device_memory_bytes=500 * GIB)
    result = comparison(machine=machine, train_tokens=109 * tokens_a_day)
    assert result.resident is not None
    assert result.resident.num_gpus == 1
    assert result.resident.days == pytest.approx(109)
    assert 109 / (4 * 0.85) > 30 > 109 / (5 * 0.85)
    assert "5 GPUs that hold the model would end within 30 days" in verdict_sentences(result)[-1]


def test_no_price_means_no_money() -> None:
    result = comparison(machine=make_machine(price_per_hour=None))
    assert result.offload.dollars is None
    assert any("--price-per-hour" in s for s in assumption_sentences(result))
    assert "cost" not in verdict_sentences(result)[0]


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (0.4, "60% less"),
        (1.01, "the same"),
        (1.9, "90% more"),
        (2.6, "2.6 times as much"),
        (25.98, "26 times as much"),
    ],
)
def test_money_as_people_compare_it(times: float, words: str) -> None:
    result = comparison()
    assert result.resident is not None
    assert result.resident.dollars is not None
    dear = replace(result.offload, dollars=times * result.resident.dollars)
    assert verdict_sentences(replace(result, offload=dear))[0].endswith(f", and costs {words}.")


@pytest.mark.parametrize(
    ("machine", "device"),
    [
        (make_machine(device_name="CPU of a laptop", device_memory_bytes=24 * GIB), "machine"),
        (make_machine(is_unified=True, device_memory_bytes=24 * GIB), "machine"),
        (make_machine(device_memory_bytes=24 * GIB), "GPU"),
    ],
)
def test_a_cpu_is_called_no_gpu(machine: Machine, device: str) -> None:
    for changes in ({}, {"num_parameters": 100_000_000}, {"train_tokens": 15e12}):
        result = comparison(machine=machine, **changes)
        said = " ".join([*verdict_sentences(result), *assumption_sentences(result)])
        assert f" {device}" in said
        assert ("GPU" in said) == (device == "GPU")


@pytest.mark.parametrize("tokens", [0, -1, float("nan"), float("inf")])
def test_tokens_must_be_a_number_to_train_on(tokens: float) -> None:
    with pytest.raises(ValueError, match="positive number"):
        comparison(train_tokens=tokens)


def test_gpus_must_be_some() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        comparison(num_gpus=0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (42, "42 s"),
        (750, "12.5 min"),
        (26_000, "7.2 hours"),
        (300_000, "3.5 days"),
        (1e9, "31.7 years"),
    ],
)
def test_durations_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("tokens", "text"), [(512, "512"), (2.5e8, "250 M"), (1e9, "1 B"), (1.5e13, "15 T")]
)
def test_tokens_as_people_write_them(tokens: float, text: str) -> None:
    assert format_tokens(tokens) == text
