"""Refusals: changes that were tried, alone or together, in the words of whoever asked."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from machines import GIB, H200, tiny_spec
from numpy.typing import NDArray
from peft import LoraConfig

from outcore.errors import DoesNotFit
from outcore.machine.catalogue import catalogue_machine
from outcore.model_spec import ModelSpec, model_spec
from outcore.planning.change_words import command_line_words, python_words
from outcore.planning.changes import Changes
from outcore.planning.device_type import computing_on_cpu
from outcore.planning.plan import Budgets, Job
from outcore.planning.search import _needs as needs_of
from outcore.planning.search import fits, make_plan
from outcore.units import parse_bytes

CARD = replace(  # a card with 24 GB in a workstation with a disk
    H200, device_memory_bytes=25_200_000_000, host_memory_bytes=128 * GIB, disk_bytes=2048 * GIB
)
NO_DISK = Budgets(disk_bytes=0)


def refusal(shape: str, job: Job) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model_spec(shape), CARD, job)
    for change in caught.value.changes:
        assert fits(model_spec(shape), CARD, change.job), change.what
    return caught.value


def test_one_change_is_enough_where_one_fits() -> None:
    job = Job(tokens=32_768, seq_len=2048, budgets=replace(NO_DISK, host_bytes=60 * GIB))
    found = refusal("qwen2.5-7b", job)
    assert found.changes
    assert not any(" and " in change.what for change in found.changes)


@pytest.mark.parametrize("device_bytes", [None, GIB])
def test_of_one_memory_the_budget_that_was_given_is_the_one_to_raise(
    device_bytes: int | None,
) -> None:
    machine = replace(H200, is_unified=True)
    budgets = replace(NO_DISK, host_bytes=GIB, device_bytes=device_bytes)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(tiny_spec(), machine, Job(tokens=32_768, seq_len=2048, budgets=budgets))
    larger = next(c for c in caught.value.changes if c.job.budgets != budgets)
    assert "--host-memory" in larger.options
    assert ("--device-memory" in larger.options) == (device_bytes is not None)
    assert fits(tiny_spec(), machine, larger.job)


@pytest.mark.parametrize(
    ("name", "has"), [("m4-max", "96.0 GiB for its device"), ("cpu-laptop", "28.0 GiB")]
)
@pytest.mark.parametrize("host_bytes", [None, 20 * GIB])
def test_one_memory_that_is_too_small_is_asked_for_once(
    name: str, has: str, host_bytes: int | None
) -> None:
    machine, spec = catalogue_machine(name), model_spec("llama-3.1-8b")
    budgets = replace(NO_DISK, host_bytes=host_bytes)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, replace(ASKED, budgets=budgets))
    larger = caught.value.changes[-1]
    assert re.fullmatch(r"\d+\.\d GiB of memory \(the machine has " + has + r"\)", larger.options)
    assert larger.what == larger.options
    assert fits(spec, machine, larger.job)


def test_a_micro_batch_follows_fewer_tokens() -> None:
    budgets = replace(NO_DISK, device_bytes=12 * GIB)
    job = Job(tokens=128 * 8192, seq_len=8192, micro_batch=63, budgets=budgets)
    found = refusal("qwen2.5-0.5b", job)
    (fewer,) = (change for change in found.changes if change.job.tokens < job.tokens)
    sequences = fewer.job.sequences
    assert sequences < 63
    assert fewer.options == f"--tokens {fewer.job.tokens} --micro-batch {sequences}"


@pytest.mark.parametrize(
    ("shape", "name"), [("llama-3.1-70b", "rtx-4090"), ("qwen2.5-32b", "h200-pcie5")]
)
def test_bytes_are_told_of_one_tier_where_that_takes_hardly_more(shape: str, name: str) -> None:
    """The least sum is parted between device and host, which nobody would add a little of each."""
    machine = catalogue_machine(name)
    job = Job(tokens=32_768, seq_len=2048, budgets=NO_DISK)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model_spec(shape), machine, job)
    assert set(caught.value.missing_bytes) == {"host"}
    needed = machine.host_memory_bytes + caught.value.missing_bytes["host"]
    enough = (change.job.budgets.host_bytes for change in caught.value.changes)
    assert min(num_bytes for num_bytes in enough if num_bytes) == pytest.approx(needed, rel=0.02)


def test_a_pair_where_no_single_change_fits() -> None:
    job = Job(tokens=524_288, seq_len=2048, budgets=NO_DISK)
    found = refusal("qwen2.5-14b", job)
    first, *larger = found.changes
    assert first.what.startswith("tokens=")
    assert ' and disk="PATH:' in first.what
    assert first.options == f"--tokens {first.job.tokens} --disk {first.what.split(chr(34))[1]}"
    assert all("the machine has" in change.what for change in larger)
    # As many tokens as fit, and the disk as it is printed.
    spec, more = model_spec("qwen2.5-14b"), first.job.tokens + job.seq_len
    size = parse_bytes(first.what.split("PATH:")[1].rstrip(chr(34)))
    printed = replace(first.job.budgets, disk_bytes=size)
    assert fits(spec, CARD, replace(first.job, budgets=printed))
    whole = replace(printed, disk_bytes=None)
    assert not fits(spec, CARD, replace(first.job, tokens=more, budgets=whole))
    for alone in (replace(first.job, budgets=job.budgets), replace(first.job, tokens=job.tokens)):
        assert not fits(spec, CARD, alone)


def test_three_changes_where_no_pair_fits() -> None:
    found = refusal("llama-3.1-70b", Job(tokens=65_536, seq_len=2048, budgets=NO_DISK))
    assert found.changes[0].options.startswith("--tokens 57344 --clip-in-two-passes --disk PATH:")
    assert found.changes[0].what.startswith('tokens=57344, clipping="two-pass" and disk=')


def test_a_larger_budget_with_the_disk_where_the_machine_has_both() -> None:
    budgets = Budgets(disk_bytes=0, device_bytes=8 * GIB, host_bytes=20 * GIB)
    found = refusal("qwen2.5-7b", Job(tokens=32_768, seq_len=2048, budgets=budgets))
    assert found.changes[0].options.startswith("--device-memory ")
    assert " --disk PATH:" in found.changes[0].options


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen2.5-7b", "--device-memory X --host-memory X"),
        ("qwen3-30b-a3b", "--device-memory X --host-memory X --disk PATH:X"),
        ("llama-3.1-70b", "--clip-in-two-passes --device-memory X --host-memory X --disk PATH:X"),
    ],
)
def test_larger_budgets_of_both_where_the_machine_has_them(shape: str, options: str) -> None:
    """The choice that lacks least may lack more of one tier than there is."""
    budgets = Budgets(disk_bytes=0, device_bytes=GIB, host_bytes=GIB)
    found = refusal(shape, Job(tokens=32_768, seq_len=2048, budgets=budgets))
    assert re.sub(r"[\d.]+GiB", "X", found.changes[0].options) == options


@pytest.mark.parametrize("device_bytes", [4 * GIB, 26 * GIB])
def test_a_memory_that_is_parted_would_have_to_hold_both_parts(device_bytes: int) -> None:
    spec, laptop = model_spec("llama-3.1-8b"), catalogue_machine("cpu-laptop")
    machine = computing_on_cpu(laptop, device_memory=device_bytes)
    budgets = replace(NO_DISK, device_bytes=device_bytes)
    job = Job(tokens=32_768, seq_len=2048, dtype="fp32", budgets=budgets)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, job)
    assert "of host memory (the machine has 28.0 GiB)" in caught.value.changes[-1].options
    for change in caught.value.changes:
        assert fits(spec, machine, change.job), change.options


def test_a_larger_disk_where_the_machine_has_too_little_of_everything() -> None:
    machine, spec = replace(CARD, disk_bytes=64 * GIB), model_spec("llama-3.1-70b")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, Job(tokens=32_768, seq_len=2048, budgets=NO_DISK))
    first = caught.value.changes[0]
    assert first.options.startswith("--clip-in-two-passes with ")
    assert first.options.endswith(" of disk (the machine has 64.0 GiB)")
    assert fits(spec, machine, first.job)
    disk_bytes = first.job.budgets.disk_bytes
    assert disk_bytes is not None
    less = replace(first.job.budgets, disk_bytes=disk_bytes * 9 // 10)
    assert not fits(spec, machine, replace(first.job, budgets=less))


def test_a_larger_disk_is_named_once() -> None:
    """Where a disk is asked for, a larger one is a larger budget too."""
    machine = replace(CARD, disk_bytes=64 * GIB)
    job = Job(tokens=32_768, seq_len=2048, clipping="two-pass", budgets=Budgets(disk_bytes=GIB))
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model_spec("llama-3.1-70b"), machine, job)
    same_numbers = [c for c in caught.value.changes if c.job.state_format == job.state_format]
    assert ["of disk" in change.options for change in same_numbers] == [True]


@pytest.mark.parametrize(
    ("shape", "name", "disk", "most_device_gib"),
    [
        ("deepseek-v3", "h200-pcie5", NO_DISK, 144),
        ("qwen3-235b-a22b", "rtx-4090", Budgets(disk_bytes=10 << 40, disk_path="/d"), 38),
        ("llama-3.1-405b", "rtx-4090", NO_DISK, 60),
        ("gpt-oss-120b", "rtx-5090", NO_DISK, 44),
    ],
)
def test_a_machine_that_is_little_larger_with_changes(
    shape: str, name: str, disk: Budgets, most_device_gib: int
) -> None:
    """Not one whose device holds everything, a hundred times as large."""
    spec, machine = model_spec(shape), catalogue_machine(name)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, Job(tokens=32_768, seq_len=2048, budgets=disk))
    first = caught.value.changes[0]
    assert "--clip-in-two-passes" in first.options
    assert "of device memory (the machine has" in first.options
    assert (first.job.budgets.device_bytes or 0) <= most_device_gib * GIB
    for change in caught.value.changes:
        assert fits(spec, machine, change.job), change.options
        assert (change.job.budgets.device_bytes or 0) < 10 * machine.device_memory_bytes
    # What is missing is told of the host, as far as the host can hold it.
    assert caught.value.missing_bytes["device"] < 2 * machine.device_memory_bytes
    assert caught.value.missing_bytes["host"]


def test_a_larger_machine_is_named_with_what_changes_numbers_last() -> None:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model_spec("llama-3.1-405b"), catalogue_machine("b200"), ASKED)
    formats = [change.job.state_format for change in caught.value.changes]
    assert formats[0] == "fp32"
    assert formats == sorted(formats, key=lambda name: name != "fp32")
    assert "minimal" in formats


def test_a_memory_of_ten_times_the_machine_is_not_named_beside_what_fits_here() -> None:
    spec, machine = model_spec("llama-3.1-70b"), catalogue_machine("rtx-4090")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, ASKED)
    assert caught.value.changes[0].options.startswith("--clip-in-two-passes --disk PATH:")
    assert not any("of device memory" in change.options for change in caught.value.changes)


@pytest.mark.parametrize(
    "budgets", [NO_DISK, replace(NO_DISK, device_bytes=8 * GIB, host_bytes=32 * GIB), Budgets()]
)
@pytest.mark.parametrize("tokens", [131_072, 1 << 20])
def test_405b_is_refused_in_5_s(tokens: int, budgets: Budgets) -> None:
    job = Job(tokens=tokens, seq_len=1024, budgets=budgets)
    spec = model_spec("llama-3.1-405b")
    start = time.process_time()
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, CARD, job)
    assert time.process_time() - start < 5
    assert caught.value.changes


def adapted(shape: str) -> ModelSpec:
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return model_spec(shape, adapters=adapters)


@pytest.mark.parametrize(
    ("shape", "format"), [("llama-3.1-70b", "int8"), ("qwen2.5-72b", "int8"), ("gpt-oss-120b", "")]
)
def test_a_frozen_base_may_be_kept_in_fewer_bits(shape: str, format: str) -> None:
    """As formats of state, after what changes no number, and the one that changes less."""
    spec, machine = adapted(shape), catalogue_machine("rtx-4090")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, ASKED)
    frozen = [c for c in caught.value.changes if "--frozen-weights" in c.options]
    assert [c.options for c in frozen] == ([f"--frozen-weights {format}"] if format else [])
    here = [c for c in caught.value.changes if "(the machine has" not in c.options]
    assert here[-len(frozen) :] == frozen or not frozen
    for change in caught.value.changes:
        assert fits(spec, machine, change.job), change.options


def test_what_is_trained_whole_has_no_frozen_base() -> None:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model_spec("llama-3.1-70b"), catalogue_machine("rtx-4090"), ASKED)
    assert "frozen" not in f"{caught.value} {caught.value.command_line}"


def test_a_machine_that_is_larger_for_a_frozen_base_in_fewer_bits() -> None:
    machine = replace(CARD, disk_bytes=0, disk_read_bytes_s=0.0)
    job, spec = replace(ASKED, tokens=2048), adapted("llama-3.1-405b")
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, job)
    formats = [change.job.frozen_weights for change in caught.value.changes]
    assert formats == [None, "int4", "int8"]  # of those that change numbers the cheapest first
    assert "of host memory (the machine has" in caught.value.changes[1].options
    for change in caught.value.changes:
        assert fits(spec, machine, change.job), change.options


def test_few_combinations_of_changes_are_tried() -> None:
    """Where four changes have to come together, these four are tried, and not all of fewer."""
    job = Job(tokens=32_768, seq_len=2048, budgets=NO_DISK)
    spec, machine, tried = model_spec("llama-3.1-70b"), catalogue_machine("h200-pcie5"), 0

    def needs(changed: Job) -> NDArray[np.int64]:
        nonlocal tried
        tried += 1
        return needs_of(spec, machine, changed)

    first, *_ = Changes(job, machine, needs).fitting()
    assert command_line_words(job, first, machine).startswith(
        "--tokens 24576 --clip-in-two-passes --state minimal --disk PATH:"
    )
    assert tried < 50  # 69 before those were left out that cannot fit


ASKED = Job(tokens=32_768, seq_len=2048, budgets=NO_DISK)


@pytest.mark.parametrize(
    ("changes", "python", "options"),
    [
        ({"tokens": 2048}, "tokens=2048", "--tokens 2048"),
        ({"micro_batch": 1}, "micro_batch=1", "--micro-batch 1"),
        ({"clipping": "two-pass"}, 'clipping="two-pass"', "--clip-in-two-passes"),
        ({"state_format": "compact"}, 'state_format="compact"', "--state compact"),
        ({"frozen_weights": "int8"}, 'frozen_weights="int8"', "--frozen-weights int8"),
        (
            {"budgets": replace(NO_DISK, disk_bytes=64 * GIB)},
            'disk="PATH:64.0GiB"',
            "--disk PATH:64.0GiB",
        ),
        (
            {"budgets": replace(NO_DISK, disk_bytes=2_000_000_000_000)},
            'disk="PATH:1907348MiB"',  # with one decimal it would be 1.8 TiB
            "--disk PATH:1907348MiB",
        ),
        (
            {"budgets": replace(NO_DISK, disk_path="/nvme", disk_bytes=64 * GIB)},
            'disk="/nvme:64.0GiB"',
            "--disk /nvme:64.0GiB",
        ),
        (
            {"budgets": replace(NO_DISK, device_bytes=20 * GIB, host_bytes=100 * GIB)},
            'device_memory="20.0GiB" and host_memory="100.0GiB"',
            "--device-memory 20.0GiB --host-memory 100.0GiB",
        ),
        (
            {"budgets": replace(NO_DISK, device_bytes=48 * GIB)},
            "49.0 GiB of device memory (the machine has 23.5 GiB)",
            "49.0 GiB of device memory (the machine has 23.5 GiB)",
        ),
        (
            {
                "micro_batch": 1,
                "budgets": replace(NO_DISK, device_bytes=48 * GIB, disk_bytes=4096 * GIB),
            },
            "micro_batch=1, 49.0 GiB of device memory (the machine has 23.5 GiB) and 4.0 TiB of "
            "disk (the machine has 2.0 TiB)",
            "--micro-batch 1 with 49.0 GiB of device memory (the machine has 23.5 GiB) and 4.0 TiB "
            "of disk (the machine has 2.0 TiB)",
        ),
        (
            {"tokens": 2048, "clipping": "two-pass", "state_format": "minimal"},
            'tokens=2048, clipping="two-pass" and state_format="minimal"',
            "--tokens 2048 --clip-in-two-passes --state minimal",
        ),
    ],
)
def test_a_change_in_words(changes: dict[str, Any], python: str, options: str) -> None:
    changed = replace(ASKED, **changes)
    assert python_words(ASKED, changed, CARD) == python
    assert command_line_words(ASKED, changed, CARD) == options


def test_a_change_that_needs_nearly_all_of_a_disk_fits_as_it_is_printed() -> None:
    spec, machine = model_spec("llama-3.1-405b"), catalogue_machine("m5-max")
    job = Job(tokens=7, seq_len=1, clipping="two-pass", budgets=NO_DISK)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(spec, machine, job)
    (change,) = (c for c in caught.value.changes if "--state compact --disk" in c.options)
    printed = parse_bytes(change.options.split("PATH:")[1])
    budgets = replace(change.job.budgets, disk_bytes=printed)
    assert fits(spec, machine, replace(change.job, budgets=budgets)), change.options


def test_fp32_changes_its_type_with_its_state() -> None:
    asked = replace(ASKED, dtype="fp32")
    changed = replace(ASKED, state_format="compact")
    said = python_words(asked, changed, CARD)
    assert said == 'state_format="compact" and dtype="bf16"'
    assert command_line_words(asked, changed, CARD) == "--state compact"
