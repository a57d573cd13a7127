"""What is no step or no budget is refused before anything is computed; large steps are quick."""

from __future__ import annotations

import time
from typing import Any

import pytest
from machines import H200, tiny_spec

import outcore
from outcore.errors import DoesNotFit
from outcore.model_spec import model_spec
from outcore.planning.plan import Job
from outcore.planning.search import make_plan
from outcore.planning.step_size import MOST_TOKENS


@pytest.mark.parametrize(
    ("tokens", "seq_len", "message"),
    [
        (10**18, 2048, r"tokens is 1,000,000,000,000,000,000, but .* at most 268,435,456 tokens"),
        (10**9, 10**9, r"seq_len is 1,000,000,000, but .* one optimizer step"),
        (0, 2048, "tokens must be a whole number of 1 or more, not 0"),
        (2048, -1, "seq_len must be a whole number of 1 or more, not -1"),
        (4096.0, 2048, r"tokens must be a whole number of 1 or more, not 4096\.0"),
        ("32k", 2048, "tokens must be a whole number of 1 or more, not '32k'"),
        (True, 1, "tokens must be a whole number"),
        (5000, 2048, r"tokens \(5,000\) must be a multiple .* 4,096 or 6,144"),
        (5, 2048, r"tokens \(5\) must be a multiple .* such as 2,048"),
    ],
)
def test_no_step(tokens: Any, seq_len: Any, message: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        outcore.plan("llama-3.1-405b", tokens=tokens, seq_len=seq_len, machine="h200-pcie5")
    assert time.process_time() - start < 1


def test_a_budget_without_its_unit_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match=r"device_memory is 24 bytes; did you mean 24GiB\?"):
        outcore.plan("no-such-shape", tokens=2048, seq_len=2048, device_memory=24)


@pytest.mark.parametrize("micro_batch", [0, -1, 1.5, "x"])
def test_no_micro_batch(micro_batch: Any) -> None:
    with pytest.raises(ValueError, match="micro_batch must be 1 or more"):
        outcore.plan(
            "qwen2.5-7b", tokens=2048, seq_len=2048, machine="h200-pcie5", micro_batch=micro_batch
        )


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"state_format": "int8"}, "state_format must be one of 'fp32', 'compact', 'minimal'"),
        ({"state_format": "compact", "dtype": "fp32"}, "is for dtype=torch.bfloat16, not torch.fl"),
        ({"objective": "money"}, 'objective must be "speed" or "memory", not \'money\''),
        ({"machine": None}, "machine must be a name such as 'here', or a Machine, not None"),
    ],
)
def test_no_choice(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outcore.plan(
            "smollm2-135m", **{"tokens": 2048, "seq_len": 2048, "machine": "h200-pcie5", **choice}
        )


def test_a_job_of_too_many_tokens() -> None:
    with pytest.raises(ValueError, match="2,000,000,000 tokens, but a step of at most"):
        make_plan(tiny_spec(), H200, Job(tokens=2 * 10**9, seq_len=1000))


@pytest.mark.parametrize("seq_len", [1, 2048, MOST_TOKENS])
def test_the_largest_step_overflows_nothing(seq_len: int) -> None:
    start = time.process_time()
    with pytest.raises(DoesNotFit) as caught:
        make_plan(model_spec("llama-3.1-405b"), H200, Job(tokens=MOST_TOKENS, seq_len=seq_len))
    assert time.process_time() - start < 8
    assert all(0 < missing < 2**62 for missing in caught.value.missing_bytes.values())
