"""`outcore verify`: what it prints, writes and returns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import link_snapshot, offline_cache, put_snapshot
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from outcore.cli import app, verify_table
from outcore.verify import exactness, plain_torch

QUICK = ["--steps", "2", "--seq-len", "8", "--device", "cpu"]


def run_verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


def unwrapped(output: str) -> str:
    """Return a message as written, out of the box that typer puts around it."""
    return " ".join(word for word in output.split() if word != "│")


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    every = exactness.placements(max_delay_s=0.001)
    monkeypatch.setattr("outcore.verify.placements", lambda: every)


@pytest.mark.usefixtures("no_delays")
def test_every_placement_is_a_row_and_json_has_them_all(tiny_model: Path, tmp_path: Path) -> None:
    result = run_verify(str(tiny_model), *QUICK, "--json", str(tmp_path / "result.json"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "result.json").read_text())
    names = [row["name"] for row in report["placements"]]
    assert names == [placement.name for placement in exactness.placements()]
    for name in names:
        assert name in result.stdout
    num_runs = len(names) + 2  # the resident one before them, plain torch after
    assert f"1 of {num_runs}, resident: " in result.stdout
    assert f"2 of {num_runs}, {names[0]}: same bits, " in result.stdout
    # As it is done, in the table, and in the verdict.
    assert result.stdout.count("same bits") == 2 * len(names) + 1
    assert report["passed"] is True
    assert report["num_layers"] == 3
    assert report["job"]["dtype"] == "float32"
    assert len(report["losses"]) == 2
    assert report["plain_torch"]["worst_relative_difference"] < 1e-5
    assert report["plain_torch"]["worst_parameter"] in report["plain_torch"]["differences"]
    assert report["machine"]["cores"] >= 1
    # A wheel's metadata may leave the build out: 2.9.0 is torch 2.9.0+cu128.
    assert torch.__version__.startswith(report["machine"]["versions"]["torch"])


@pytest.mark.usefixtures("no_delays")
def test_only_some_placements(tiny_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ("--steps", "1", "--disk", str(tmp_path), "--only", "disk", "--only", "kept")
    result = run_verify(str(tiny_model), *words, "--json", str(report))
    assert result.exit_code == 0, result.output
    names = [row["name"] for row in json.loads(report.read_text())["placements"]]
    assert names == ["both, kept", "state on disk", "weights and state on disk"]
    refused = run_verify(str(tiny_model), "--only", "kept", "--only", "tape")
    assert refused.exit_code == 2
    assert "random delays" in unwrapped(refused.output)


def test_json_on_stdout_is_nothing_but_json(tiny_model: Path) -> None:
    result = run_verify(str(tiny_model), *QUICK, "--layers", "2", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_layers"] == 2
    assert "same bits" in result.stderr


@pytest.mark.usefixtures("no_delays")
def test_one_wrong_bit_is_found_and_named(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = exactness.run_steps

    def flips_a_bit(model: nn.Module, optimizer: Any, job: exactness.VerifyJob) -> list[float]:
        losses = honest(model, optimizer, job)
        if hasattr(optimizer, "synchronize") and job.micro_batch != job.sequences:
            optimizer.synchronize()
            flips_a_bit.calls += 1  # type: ignore[attr-defined]
            if flips_a_bit.calls == 3:  # type: ignore[attr-defined]
                weight = model.get_parameter("model.layers.1.mlp.up_proj.weight").data
                weight.view(torch.int32).view(-1)[0] ^= 1
        return losses

    flips_a_bit.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(exactness, "run_steps", flips_a_bit)
    result = run_verify(str(tiny_model), *QUICK)
    assert result.exit_code == 1
    assert "state on host differs from the resident run" in result.stdout
    assert "model.layers.1.mlp.up_proj.weight" in result.stdout
    assert "Not the same" in result.stdout


@pytest.mark.usefixtures("no_delays")
def test_being_too_far_from_torch_fails(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = plain_torch.train_ours

    def drifts(*arguments: Any) -> dict[str, torch.Tensor]:
        parameters = honest(*arguments)
        parameters["lm_head.weight"] *= 1.0001
        return parameters

    monkeypatch.setattr(plain_torch, "train_ours", drifts)
    result = run_verify(str(tiny_model), *QUICK)
    assert result.exit_code == 1
    assert "too far" in result.stdout
    assert "lm_head.weight is 1.0e-04 away" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen-7b"], "qwen2.5-7b, qwen3-0.6b"),
        (["./no-such-directory"], "neither a directory, nor an id of the Hub (org/name), nor"),
        (["{empty}"], "no config.json"),
        (["{model}", "--layers", "1"], "Invalid value for '--layers'"),
        (["{model}", "--layers", "7"], "has 3 layers, 7 were asked for"),
        (["{model}", "--device", "tpu"], "neither cuda nor cpu"),
        (["{model}", "--device", "cpu:x"], "neither cuda nor cpu"),
        (["{model}", "--dtype", "fp16"], "fp32"),
        (["{model}", "--json", "/no/such/place/x.json"], "/no/such/place is no directory"),
        (["llama-3.1-405b", "--device", "cpu"], "are free"),
    ],
)
def test_mistakes_get_an_answer_and_status_2(
    arguments: list[str], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    filled = [a.format(model=tiny_model, empty=tmp_path) for a in arguments]
    result = run_verify(*filled)
    assert result.exit_code == 2
    assert message in unwrapped(result.output)
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("no_delays")
def test_an_id_of_the_hub_is_verified_from_its_cache(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = put_snapshot(offline_cache(tmp_path / "hub", monkeypatch), "some-org/small")
    for name in ("config.json", "model.safetensors"):
        (blobs / name).write_bytes((tiny_model / name).read_bytes())
    link_snapshot(blobs)
    result = run_verify("some-org/small", *QUICK, "--only", "state on host", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"] == "some-org/small"
    result = run_verify("some-org/another", *QUICK)
    assert result.exit_code == 2
    assert "cannot be had from the Hugging Face Hub: it is not in the cache" in result.output


def test_a_model_that_cannot_be_offloaded_is_told(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**{**config, "num_hidden_layers": 1}))
    model.save_pretrained(tmp_path)
    result = run_verify(str(tmp_path), *QUICK)
    assert result.exit_code == 2
    assert "no repeated blocks" in result.output


def test_a_step_that_memory_cannot_hold_is_told(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr("outcore.verify.train", no_room)
    result = run_verify(str(tiny_model), *QUICK)
    assert result.exit_code == 2
    assert "error: no memory is left for a step of 4 × 8 tokens beside the model" in result.stderr


def test_another_failure_is_not_taken_for_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("outcore.verify.train", fails)
    assert isinstance(run_verify(str(tiny_model), *QUICK).exception, RuntimeError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_names_the_way_out(tiny_model: Path) -> None:
    result = run_verify(str(tiny_model), "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cpu" in result.output


def test_on_a_terminal_the_run_and_the_time_left_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(verify_table.time, "monotonic", lambda: now_s)
    table = verify_table.VerifyTable(["state on host", "both, kept"])

    def shown() -> str:
        console = Console(force_terminal=True, width=80, color_system=None)
        with console.capture() as captured:
            console.print(table)
        return captured.get()

    assert "run 1 of 4\n" in shown()
    now_s = 110.0
    table.resident_done(exactness.TrainedRun(losses=[1.0], digests={}, seconds=10.0))
    now_s = 113.0
    # Two placements, and three trainings for plain torch, at 10 s each; 3 s of it are over.
    assert "run 2 of 4, about 47 s left" in shown()
    now_s = 300.0
    assert "run 2 of 4\n" in shown()


def test_files_that_make_no_model_are_told(tiny_model: Path, tmp_path: Path) -> None:
    values = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    (tmp_path / "config.json").write_text(json.dumps(values))
    result = run_verify(str(tmp_path), *QUICK)
    assert result.exit_code == 2
    assert f"error: {tmp_path} cannot be loaded (" in result.stderr
    (tmp_path / "config.json").write_text(json.dumps({**values, "hidden_size": -32}))
    result = run_verify(str(tmp_path), *QUICK)
    assert result.exit_code == 2
    assert "its config makes no model" in unwrapped(result.output)
