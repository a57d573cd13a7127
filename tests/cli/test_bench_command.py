"""`outcore bench train`: what it prints, writes and returns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import link_snapshot, offline_cache, put_snapshot
from typer.testing import CliRunner, Result

from outcore.bench.job import BenchFailure, BenchJob, BenchResult
from outcore.bench.peers import runner
from outcore.cli import app

QUICK = ["--sequences", "2", "--seq-len", "8", "--steps", "2", "--warmup", "1"]


def run_bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "train", *arguments])


def result_of(name: str, step_s: float) -> BenchResult:
    return BenchResult(
        name=name,
        step_s=step_s,
        all_step_s=[step_s],
        first_step_s=9.0,
        tokens_per_s=16 / step_s,
        tflops=400 / step_s,
        device_peak_bytes=24 * 2**30,
        device_reserved_bytes=25 * 2**30,
        host_rss_bytes=100 * 2**30,
        loss=1.0,
        notes={"optimizer_state": "host, fp32", "fp32_master": True, "clipping": False},
    )


def unwrapped(output: str) -> str:
    """Return a message as written, out of the box that typer puts around it."""
    return " ".join(word for word in output.split() if word != "│")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[BenchJob]:
    """Rows at once, without a process; the jobs that were asked for."""
    asked: list[BenchJob] = []
    rows: dict[str, Any] = {
        "outcore": result_of("outcore", 2.0),
        "native": result_of("native", 3.0),
        "torchao": BenchFailure(name="torchao", failed="No module named 'torchao'"),
    }

    def run_peer(name: str, job: BenchJob, *, limit_s: float) -> Any:
        asked.append(job)
        return rows[name]

    monkeypatch.setattr(runner, "run_peer", run_peer)
    return asked


def test_rows_ratios_and_reasons(jobs: list[BenchJob], tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = run_bench(
        "--shape", str(tiny_model), *QUICK, "--peers", "native, torchao", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert "1.50x" in result.stdout
    assert "torchao failed: No module named 'torchao'" in result.stdout
    report = json.loads(file.read_text())
    assert [row["name"] for row in report["systems"]] == ["outcore", "native", "torchao"]
    assert [row["outcore_ratio"] for row in report["systems"]] == [None, 1.5, None]
    # A wheel's metadata may leave the build out: 2.9.0 is torch 2.9.0+cu128.
    assert torch.__version__.startswith(report["machine"]["versions"]["torch"])
    assert report["machine"]["ram_bytes"] > 0


def test_options_reach_the_job(jobs: list[BenchJob], tiny_model: Path) -> None:
    options = ["--device-memory", "1GiB", "--weights", "device", "--activations", "keep"]
    options += ["--num-slots", "1"]
    result = run_bench("--shape", str(tiny_model), *QUICK, *options, "--no-clip", "--tie")
    assert result.exit_code == 0, result.output
    assert jobs[0].max_grad_norm is None
    assert jobs[0].config["tie_word_embeddings"] is True
    assert jobs[0].outcore_options == {
        "device_memory": "1GiB",
        "weights": "device",
        "state": "host",
        "activations": "keep",
        "num_slots": 1,
    }


def test_heads_are_untied_and_gradients_clipped_by_default(
    jobs: list[BenchJob], tiny_model: Path
) -> None:
    run_bench("--shape", str(tiny_model), *QUICK, "--clip", "0.5")
    assert jobs[0].config["tie_word_embeddings"] is False
    assert jobs[0].max_grad_norm == 0.5


def test_an_id_of_the_hub_needs_its_config_alone(
    jobs: list[BenchJob], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = put_snapshot(offline_cache(tmp_path / "hub", monkeypatch), "some-org/small")
    (blobs / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    link_snapshot(blobs)
    result = run_bench("--shape", "some-org/small", *QUICK)
    assert result.exit_code == 0, result.output
    assert "some-org/small: 2 × 8 tokens a step" in result.stdout
    assert jobs[0].config["hidden_size"] == 32
    result = run_bench("--shape", "some-org/another", *QUICK)
    assert result.exit_code == 2
    assert "cannot be had from the Hugging Face Hub: it is not in the cache" in result.output


def test_outcore_failing_is_status_1(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = BenchFailure(name="outcore", failed="OutOfBudget: [device] needs 3 GiB")
    monkeypatch.setattr(runner, "run_peer", lambda *_, **__: failure)
    result = run_bench("--shape", str(tiny_model), *QUICK)
    assert result.exit_code == 1
    assert "OutOfBudget: [device] needs 3 GiB" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="would compile on the device")
def test_outcore_and_native_in_processes_of_their_own(tiny_model: Path) -> None:
    result = run_bench("--shape", str(tiny_model), *QUICK, "--peers", "native", "--json", "-")
    assert result.exit_code == 0, result.output
    outcore, native = json.loads(result.stdout)["systems"]
    assert len(outcore["all_step_s"]) == 2
    assert native["outcore_ratio"] == pytest.approx(native["step_s"] / outcore["step_s"])
    assert "No GPU" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "qwen-7b"], "qwen2.5-7b, qwen3-0.6b"),
        (["--shape", "{empty}"], "has no config.json"),
        (["--peers", "natvie"], "known: native, torchao, roundpipe, deepspeed"),
        (["--clip", "0"], "0 is no norm to clip to; --no-clip does not clip"),
        (["--clip", "nan"], "nan is no norm to clip to"),
        (["--device-memory", "24 apples"], "write for example '24GiB'"),
        (["--shape", "{model}", "--micro-batch", "3"], "does not divide 16"),
        (["--json", "/no/such/place/x.json"], "/no/such/place is no directory"),
    ],
)
def test_mistakes_get_an_answer_and_status_2(
    arguments: list[str], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    result = run_bench(*[a.format(model=tiny_model, empty=tmp_path) for a in arguments])
    assert result.exit_code == 2
    assert message in unwrapped(result.output)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{not json", "config.json: is no JSON"),
        ('{"model_type": "llama", "hidden_size": "big"}', "config.json: "),
        ('{"model_type": "llama", "hidden_size": -64}', "its config makes no model"),
    ],
)
def test_a_config_that_makes_no_model(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    result = run_bench("--shape", str(tmp_path), *QUICK)
    assert result.exit_code == 2
    assert message in unwrapped(result.output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_large_job_without_a_gpu_is_refused() -> None:
    result = run_bench("--shape", "qwen2.5-7b")
    assert result.exit_code == 2
    assert "no GPU" in result.output
    assert "smollm2-135m" in result.output
