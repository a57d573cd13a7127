"""`outcore train`: the command around a run, and the demonstration."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from handmade_plans import make_machine
from train_processes import started, wait_for
from typer.testing import CliRunner, Result

from outcore.cli import app
from outcore.errors import DoesNotFit
from outcore.train import demo, subject
from outcore.train.demo import Demo, make_demo
from outcore.train.lagged_values import LaggedValues


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, one_torch_thread: None, closed_engines: None) -> None:
    machine = make_machine(device_name="CPU", name="here", is_unified=True)
    monkeypatch.setattr(subject, "here", lambda **_: machine)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="session")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return make_demo(tmp_path_factory.mktemp("demonstration"), device="cpu")


@pytest.fixture
def job(demonstration: Demo, tmp_path: Path) -> Demo:
    """The demonstration with few rows: each run makes tokens of all that it is given."""
    rows = Path(demonstration.settings.data[0]).read_text().splitlines(keepends=True)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(rows[:500]))
    return replace(demonstration, settings=replace(demonstration.settings, data=(str(few),)))


def run_train(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", "--device", "cpu", *arguments])


def arguments_of(job: Demo, output: Path, *more: str) -> list[str]:
    settings = job.settings
    return [
        *("--model", settings.model, "--data", settings.data[0], "--output", str(output)),
        *("--seq-len", "64", "--tokens-per-step", "256", "--num-workers", "1", "--no-tensorboard"),
        *more,
    ]


def test_a_run_from_the_command_line(job: Demo, tmp_path: Path) -> None:
    arguments = arguments_of(job, tmp_path / "out", "--max-steps", "3", "--json", "-")
    result = run_train(*arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["step"] == 3
    assert "step 3/3" in result.stderr
    assert "home of" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_loss_that_is_no_number_is_null_in_json(
    job: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_number(self: LaggedValues) -> list[float] | None:
        return None if last(self) is None else [float("nan")]

    last = LaggedValues.last
    monkeypatch.setattr(LaggedValues, "last", no_number)
    result = run_train(*arguments_of(job, tmp_path / "out", "--max-steps", "2"), "--json", "-")
    assert result.exit_code == 0, result.output

    def refused(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(result.stdout, parse_constant=refused)["loss"] is None


def test_a_step_of_other_tokens_than_asked_for_is_told(job: Demo, tmp_path: Path) -> None:
    arguments = [*arguments_of(job, tmp_path / "out"), "--max-steps", "1"]
    assert "tokens, not" not in run_train(*arguments).stdout
    arguments = [*arguments_of(job, tmp_path / "other"), "--max-steps", "1"]
    result = run_train(*arguments, "--tokens-per-step", "100")
    assert result.exit_code == 0, result.output
    told = "a step has 64 tokens, not 100: it takes whole sequences of 64; --tokens-per-step 64 "
    assert f"{told}or 128 would be exact\n" in result.stdout


def test_pairs_are_taken_whole(job: Demo, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    pairs.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    arguments = arguments_of(job, tmp_path / "out", "--max-steps", "1", "--data", str(pairs))
    del arguments[2:4]  # the data of the demonstration
    result = run_train(*arguments, "--tokens-per-step", "320")
    assert result.exit_code == 0, result.output
    told = "a step has 256 tokens, not 320: it takes whole pairs of sequences of 64; "
    assert f"{told}--tokens-per-step 256 or 384 would be exact\n" in result.stdout


def test_to_leave_rows_out_is_offered_where_it_helps(job: Demo, tmp_path: Path) -> None:
    rows = {"malformed": '{"text": "1+1=2"}\n{"text": 3}\n', "unknown": '{"question": "1+1="}\n'}
    for name, text in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    for name, offer in (("malformed", "--skip-bad-rows leaves such rows out"), ("unknown", "")):
        arguments = arguments_of(job, tmp_path / "out", "--data", str(tmp_path / f"{name}.jsonl"))
        del arguments[2:4]  # the data of the demonstration
        result = run_train(*arguments)
        assert result.exit_code == 2, result.output
        assert ("--skip-bad-rows" in result.stderr) == bool(offer)
        assert offer in result.stderr


def test_a_yaml_file_with_an_option_over_it(job: Demo, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {job.settings.model}\ndata: {job.settings.data[0]}\noutput: {tmp_path / 'out'}\n"
        "seq-len: 64\ntokens-per-step: 256\nmax-steps: 9\nnum-workers: 1\nlr: 1e-4\n"
    )
    result = run_train("--config", str(config), "--max-steps", "2")
    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.stdout


def test_epochs_that_are_given_go_before_the_steps_of_a_file(job: Demo, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("seq-len: 64\ntokens-per-step: 64\nmax-steps: 9\n")
    arguments = arguments_of(job, tmp_path / "out", "--config", str(config), "--epochs", "1e-9")
    result = run_train(*arguments)
    assert result.exit_code == 0, result.output
    assert "step 1/1" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "missing: data, output"),
        (["--model", "x", "--data", "y", "--output", "z"], "neither a Hugging Face directory"),
        (["--model", "smollm2-135m", "--data", "y", "--output", "z"], "--tokenizer"),
        (["--config", "/nowhere.yaml"], "nowhere.yaml"),
        (["--device", "tpu"], "device is neither cuda nor cpu: 'tpu'"),
        (["--model", "x", "--data", "y", "--output", "z", "--schedule", "cubic"], "cosine"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_train(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_model_without_a_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}')
    result = run_train("--model", str(tiny_model), "--data", str(data), "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "has no tokenizer that can be read: --tokenizer names another" in result.stderr
    assert "\n(2)" not in result.stderr


def test_data_that_is_not_there(job: Demo, tmp_path: Path) -> None:
    arguments = arguments_of(job, tmp_path / "out")
    arguments[3] = str(tmp_path / "nothing.jsonl")
    result = run_train(*arguments)
    assert result.exit_code == 2
    assert "nothing.jsonl" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "nowhere"], "error: nowhere is no directory: --tokenizer names that of a"),
        (["--device", "cpu:x"], "error: device is neither cuda nor cpu: 'cpu:x'"),
        (["--disk", "nowhere:1GiB"], "error: disk nowhere is no directory; make it, or name"),
        (["--cache-dir", "file"], "file cannot be made: File exists\n"),
        (["--output", "file"], "error: file is a file: name another --output"),
        (["--output", "file/in"], "cannot be made: Not a directory; name another --output"),
        (["--data", "bad.jsonl"], "bad.jsonl, line 1: is not JSON"),
        (["--lora", "--lora-rank", "9999999"], "is more than the model's hidden size, 128: such"),
        (["--lora-rank", "4"], "error: lora_rank is for LoRA: add --lora"),
    ],
)
def test_a_mistake_leaves_nothing_behind(
    options: list[str], message: str, job: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("file", "bad.jsonl"):
        (here / name).write_text("{")
    result = run_train(*arguments_of(job, here / "out", "--max-steps", "1"), *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert sorted(path.name for path in here.iterdir()) == ["bad.jsonl", "file"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--tokens-per-step 64; --state-format compact."),
        (["--dtype", "bf16"], "--tokens-per-step 64; --state-format compact."),
        (["--dtype", "fp32"], "--tokens-per-step 64; --state-format compact --dtype bf16."),
    ],
)
def test_a_refusal_names_options_that_this_command_takes_together(
    options: list[str], words: str, job: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        line = "It would fit with: --tokens 64; --state compact."
        raise DoesNotFit("", missing_bytes={"host": 1}, command_line=line)

    monkeypatch.setattr("outcore.train.run.train", refuse)
    result = run_train(*arguments_of(job, tmp_path / "out"), *options)
    assert result.exit_code == 2
    assert f"It would fit with: {words}\n" in result.stderr


def test_a_model_is_not_overwritten_for_want_of_a_checkpoint(job: Demo, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = arguments_of(job, output, "--max-steps", "1", "--keep", "0")
    assert run_train(*arguments).exit_code == 0
    before = (output / "model.safetensors").stat()
    result = run_train(*arguments, "--resume")
    assert result.exit_code == 2
    assert "holds a model, and no checkpoint to resume from: name another" in result.stderr
    assert (output / "model.safetensors").stat() == before


def test_a_short_demonstration_learns_something_but_not_enough() -> None:
    result = run_train("--max-steps", "12")
    assert result.exit_code == 1, "so few steps cannot be enough"
    assert "Held-out problems solved before: 0.0%" in result.stdout
    assert "90% were expected" in result.stdout
    planned = re.search(r"peak +([\d.]+) MiB +\d+% of 11.5 MiB", result.stdout)
    told = re.search(
        r"device peak ([\d.]+) MiB, (\d+)% of the training bytes", " ".join(result.stdout.split())
    )
    assert planned is not None
    assert told is not None
    assert float(told[1]) == pytest.approx(float(planned[1]), rel=0.05), "temporaries included"
    assert int(told[2]) < 50


def test_the_demonstration_asks_for_what_it_did_not_teach(demonstration: Demo) -> None:
    rows = Path(demonstration.settings.data[0]).read_text().splitlines()
    taught = {json.loads(row)["prompt"] for row in rows}
    assert len(taught) == 9000
    assert len(demonstration.held_out) == 1000
    assert not taught & {problem for problem, _ in demonstration.held_out}
    for problem, answer in demonstration.held_out[:50]:
        left, right, total = demo.readable(problem, answer).replace("=", "+").split(" + ")
        assert int(left) + int(right) == int(total)


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_run_with_a_checkpoint(
    job: Demo, tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    arguments = arguments_of(job, output, "--max-steps", "5000", "--log-every", "1")
    with started("cpu", arguments, OMP_NUM_THREADS="1") as process:
        wait_for(process, "step 3/")
        asked_s = time.monotonic()
        process.send_signal(number)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert time.monotonic() - asked_s < 20
    assert "finishing this step" in told
    assert "--resume goes on" in told
    saved = sorted((output / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    assert (saved[0] / "manifest.json").is_file()


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_keeps_what_was_computed(
    job: Demo, tmp_path: Path, number: signal.Signals
) -> None:
    pairs, output = tmp_path / "pairs.jsonl", tmp_path / "out"
    rows = ({"prompt": f"{n}+1", "chosen": f"{n + 1}", "rejected": "0"} for n in range(10, 90))
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = arguments_of(
        replace(job, settings=replace(job.settings, data=(str(pairs),))),
        output,
        *("--max-steps", "50000", "--json", str(tmp_path / "result.json")),
    )
    with started("cpu", arguments, OMP_NUM_THREADS="1") as process:
        wait_for(process, "before training: batch")
        process.send_signal(number)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "finishing this batch" in told
    assert "stopped before training; --resume goes on" in told
    assert (output / "reference.safetensors").is_file()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["step"], result["stopped_by"]) == (0, number.name)


@pytest.mark.usefixtures("no_nohup")
def test_a_reader_that_goes_away_ends_a_run_with_a_checkpoint(job: Demo, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = arguments_of(job, output, "--max-steps", "5000", "--log-every", "1")
    with started("cpu", arguments, OMP_NUM_THREADS="1") as process:
        wait_for(process, "step 3/")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
    (saved,) = (output / "checkpoints").glob("step-*")
    assert (saved / "manifest.json").is_file()


def test_a_log_that_is_full_ends_no_run(job: Demo, tmp_path: Path) -> None:
    arguments = arguments_of(job, tmp_path / "out", "--max-steps", "3", "--log-every", "1")
    with open("/dev/full", "w") as full:
        process = started("cpu", arguments, output=full, OMP_NUM_THREADS="1")
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
