"""Jobs and rows cross a process boundary as JSON and come back equal."""

import pytest

from outcore.bench.job import BenchFailure, BenchJob, BenchResult, row_from_json
from outcore.shapes import shape_dict


def make_job(**changes: object) -> BenchJob:
    fields = {"config": shape_dict("qwen2.5-0.5b"), "sequences": 16, "seq_len": 2048, **changes}
    return BenchJob(**fields)


@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": None, "micro_batch": 2, "seed": 7}])
def test_job_round_trip(changes: dict[str, object]) -> None:
    job = make_job(**changes)
    assert BenchJob.from_json(job.to_json()) == job


def test_result_round_trip() -> None:
    result = BenchResult(
        name="native",
        step_s=1.5,
        all_step_s=[1.4, 1.5, 1.6],
        first_step_s=30.0,
        tokens_per_s=21845.3,
        tflops=424.2,
        device_peak_bytes=73 * 10**9,
        device_reserved_bytes=75 * 10**9,
        host_rss_bytes=4 * 10**9,
        loss=11.9,
        notes={"fp32_master": True, "clipping": False},
    )
    assert "\n" not in result.to_json()
    assert row_from_json(result.to_json()) == result


def test_failure_round_trip() -> None:
    failure = BenchFailure(name="torchao", failed="ModuleNotFoundError: torchao", log="a\nb")
    assert row_from_json(failure.to_json()) == failure


def test_a_micro_batch_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="does not divide 16"):
        make_job(micro_batch=3)


def test_a_preferred_micro_batch_gives_way_to_the_batch() -> None:
    assert make_job().micro_batch_or(4) == 4
    assert make_job(sequences=6).micro_batch_or(4) == 3
    assert make_job(sequences=2).micro_batch_or(4) == 2
    assert make_job(micro_batch=8).micro_batch_or(4) == 8
