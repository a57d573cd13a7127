"""`outcore plan`: what it asks the planner for, and what it prints, writes and returns."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from handmade_plans import GIB, make_machine, make_plan
from hub_cache import link_snapshot, offline_cache, put_snapshot
from typer.testing import CliRunner, Result

from outcore.cli import app, planning
from outcore.errors import DoesNotFit, OutcoreError, UnsupportedModel
from outcore.machine.machine import Machine
from outcore.planning.plan import Budgets, Job, Plan
from outcore.planning.plan_json import read_plan
from outcore.shapes import shape_dict

MODEL = ["qwen2.5-7b", "--machine", "h200-pcie5"]


class Refused(OutcoreError):
    """What a planner raises when nothing fits."""


@dataclass
class TinySpec:
    name: str = "qwen2.5-7b"
    num_parameters: int = 7_600_000_000
    hidden_size: int = 3584
    longest_sequence: int = 32768
    frozen_parameters: int = 0

    def frozen_bytes(self, frozen_weights: str | None) -> int:
        return 0


class Planner:
    """Stands in for the planner: remembers the jobs, and slows down with less memory."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.least_bytes = 0

    def make_plan(self, spec: Any, machine: Machine, job: Job) -> Plan:
        self.jobs.append(job)
        budget = job.budgets.device_bytes
        if budget is not None and budget < self.least_bytes:
            raise Refused("it needs 9.0 GiB of device memory; --state compact needs 6.0 GiB")
        plan = make_plan(job=job)
        step_s = 4.1 if budget is None or budget >= 24 * GIB else 5.125
        tokens_per_s = job.tokens / step_s
        prediction = replace(plan.prediction, step_s=step_s, tokens_per_s=tokens_per_s)
        return replace(plan, prediction=prediction)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    stand_in = Planner()

    def model_spec(source: str) -> TinySpec:
        if source != "qwen2.5-7b":
            raise ValueError(f"{source!r} is neither a directory nor a shape. Shapes: qwen2.5-7b.")
        return TinySpec()

    def machine_named(name: str, disk: str | None = None) -> Machine:
        if name == "here":
            raise RuntimeError("no device")
        if name != "h200-pcie5":
            raise KeyError(f"no machine named {name!r}; known: h200-pcie5")
        return make_machine()

    monkeypatch.setattr(planning, "model_spec", model_spec)
    monkeypatch.setattr(planning, "machine_named", machine_named)
    monkeypatch.setattr(planning, "make_plan", stand_in.make_plan)
    return stand_in


def run_plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def unwrapped(output: str) -> str:
    """Return a message as written, out of the box that typer puts around it."""
    return " ".join(word for word in output.split() if word != "│")


def test_the_table_and_the_next_smaller_budget(planner: Planner) -> None:
    result = run_plan(*MODEL)
    assert result.exit_code == 0, result.output
    for fact in ("blocks 2-21", "7,992 tokens/s", "The binding lane is host cores", "140.0 GiB"):
        assert fact in result.stdout, fact
    assert "With 20.0 GiB of device memory a step takes 5.12 s, 25% longer" in result.stdout
    asked, smaller = planner.jobs
    assert asked == Job(tokens=32768, seq_len=2048, budgets=Budgets(disk_bytes=0))
    assert smaller.budgets.device_bytes == 20 * GIB


def test_the_disk_here_is_measured_at_its_path(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str | None]] = []
    found = make_machine(name="here", disk_bytes=100 * GIB, disk_read_bytes_s=1e9)

    def machine_named(name: str, disk: str | None = None) -> Machine:
        asked.append((name, disk))
        return found

    monkeypatch.setattr(planning, "machine_named", machine_named)
    assert run_plan("qwen2.5-7b", "--disk", f"{tmp_path}:100GiB").exit_code == 0
    assert asked == [("here", str(tmp_path))]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_plan("qwen2.5-7b", "--disk=~:100GiB").exit_code == 0  # not the shell's to replace
    assert asked[-1] == ("here", str(tmp_path))
    result = run_plan("qwen2.5-7b", "--disk", f"{tmp_path}:101GiB")
    assert result.exit_code == 2
    assert "--disk: 101.0 GiB, but 100.0 GiB are free at" in unwrapped(result.output)
    found = make_machine(name="here", disk_bytes=0, disk_read_bytes_s=0.0)
    result = run_plan("qwen2.5-7b", "--disk", f"{tmp_path}:1GiB")
    assert result.exit_code == 2
    assert "is memory, not a disk" in unwrapped(result.output)


def test_every_option_reaches_the_job(planner: Planner) -> None:
    result = run_plan(
        *MODEL,
        *("--tokens", "4096", "--seq-len", "512", "--device-memory", "24GiB"),
        *("--host-memory", "100GB", "--disk", "/a:b:2TiB", "--state", "compact"),
        *("--objective", "memory", "--no-clipping", "--micro-batch", "2"),
        *("--checkpoints", "--masked"),
    )
    assert result.exit_code == 0, result.output
    job = planner.jobs[0]
    assert (job.tokens, job.seq_len, job.micro_batch, job.clipping) == (4096, 512, 2, "none")
    assert (job.state_format, job.objective, job.checkpoints) == ("compact", "memory", True)
    assert job.is_masked
    assert job.budgets.device_bytes == 24 * GIB
    assert job.budgets.host_bytes == 100 * 10**9
    assert (job.budgets.disk_path, job.budgets.disk_bytes) == ("/a:b", 2 * 2**40)


def test_clipping_in_two_passes(planner: Planner) -> None:
    result = run_plan(*MODEL, "--clip-in-two-passes")
    assert result.exit_code == 0, result.output
    assert planner.jobs[0].clipping == "two-pass"
    assert "clipping in two passes" in result.output
    assert run_plan(*MODEL, "--clip-in-two-passes", "--no-clipping").exit_code == 2


@pytest.mark.parametrize(
    ("device", "state", "dtype"),
    [("CPU", "fp32", "fp32"), ("CPU", "compact", "bf16"), ("NVIDIA H200", "fp32", "bf16")],
)
def test_a_cpu_is_planned_in_fp32_as_from_python(
    device: str, state: str, dtype: str, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "machine_named", lambda *_: make_machine(device_name=device))
    result = run_plan("qwen2.5-7b", "--state", state)
    assert result.exit_code == 0, result.output
    assert {job.dtype for job in planner.jobs} == {dtype}
    assert ("Planned in fp32, in which the engine computes on a CPU" in result.stdout) == (
        dtype == "fp32"
    )


@pytest.mark.usefixtures("planner")
def test_json_and_html_are_written(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    result = run_plan(*MODEL, *files)
    assert result.exit_code == 0, result.output
    assert read_plan(tmp_path / "plan.json").blocks == make_plan().blocks
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["machine"]["device_name"] == "NVIDIA H200"
    assert report["smaller_budget"]["device_bytes"] == 20 * GIB
    assert report["comparison"] is None
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "25% longer" in page


@pytest.mark.usefixtures("planner")
def test_json_on_stdout_is_nothing_but_json() -> None:
    result = run_plan(*MODEL, "--json", "-", "--compare", "--train-tokens", "1e9")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["format"] == "outcore plan"
    assert report["comparison"]["train_tokens"] == 1e9
    assert "blocks 2-21" in result.stderr


@pytest.mark.usefixtures("planner")
def test_compare_answers_with_time_and_money() -> None:
    result = run_plan(*MODEL, "--compare", "--train-tokens", "1e13", "--gpus", "4")
    assert result.exit_code == 0, result.output
    assert "without offloading" in result.stdout
    assert "wrong tool" in result.stdout
    assert "gradients are exchanged over the link" in result.stdout
    assert "$3.50 an hour" in result.stdout
    dearer = run_plan(*MODEL, "--compare", "--train-tokens", "1e9", "--price-per-hour", "9")
    assert "$9.00 an hour" in dearer.stdout


def test_what_does_not_fit_is_an_answer_and_status_1(planner: Planner) -> None:
    planner.least_bytes = 10 * GIB
    result = run_plan(*MODEL, "--device-memory", "8GiB")
    assert result.exit_code == 1
    assert "refused: it needs 9.0 GiB of device memory" in result.stderr
    assert "--state compact needs 6.0 GiB" in result.stderr
    assert result.stdout == ""


def test_a_refusal_speaks_in_options(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Plan:
        raise DoesNotFit(
            'it would fit with: state_format="compact"',
            missing_bytes={"host": 1},
            command_line="it would fit with: --state compact",
        )

    whole = planning.make_plan
    monkeypatch.setattr(planning, "make_plan", refuse)
    result = run_plan(*MODEL)
    assert result.exit_code == 1
    assert "it would fit with: --state compact" in result.stderr
    assert "state_format" not in result.stderr

    def refuse_the_smaller(spec: Any, machine: Machine, job: Job) -> Plan:
        return whole(spec, machine, job) if job.budgets.device_bytes is None else refuse()

    monkeypatch.setattr(planning, "make_plan", refuse_the_smaller)
    result = run_plan(*MODEL)
    assert result.exit_code == 0, result.output
    assert "it does not fit. It would fit with: --state compact" in result.stdout


def test_a_smaller_budget_that_does_not_fit_is_told(planner: Planner) -> None:
    planner.least_bytes = 21 * GIB
    result = run_plan(*MODEL, "--device-memory", "24GiB")
    assert result.exit_code == 0, result.output
    assert "With 20.0 GiB of device memory it does not fit. It needs 9.0 GiB" in result.stdout


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen-7b"], "MODEL: 'qwen-7b' is neither a directory nor a shape"),
        ([], "Missing argument 'MODEL'"),
        ([*MODEL, "--machine", "h300"], "--machine: no machine named 'h300'; known: h200-pcie5"),
        (["qwen2.5-7b"], "this machine could not be measured: no device. Name one"),
        ([*MODEL, "--device-memory", "lots"], "--device-memory: size 'lots' is not a size"),
        (
            [*MODEL, "--device-memory", "24"],
            "--device-memory: size is 24 bytes; did you mean 24GiB",
        ),
        ([*MODEL, "--disk", "/scratch:500"], "--disk: size is 500 bytes; did you mean 500GiB"),
        ([*MODEL, "--host-memory", "-3GiB"], "--host-memory: size '-3GiB' is not a size"),
        ([*MODEL, "--disk", "500GiB"], "--disk: '500GiB' is not PATH:SIZE"),
        ([*MODEL, "--disk", ":500GiB"], "is not PATH:SIZE"),
        ([*MODEL, "--disk", "/scratch:"], "--disk: size '' is not a size"),
        (["qwen2.5-7b", "--disk", "/no/such:1GiB"], "--disk: /no/such is no directory"),
        ([*MODEL, "--tokens", "5000"], "no multiple of --seq-len 2,048; 4,096 or 6,144 would be"),
        ([*MODEL, "--tokens", "5"], "no multiple of --seq-len 2,048; 2,048 would be"),
        ([*MODEL, "--tokens", "0"], "Invalid value for '--tokens'"),
        ([*MODEL, "--tokens", str(10**18)], "--tokens: 1,000,000,000,000,000,000, but a step of"),
        ([*MODEL, "--tokens", str(10**30)], "but a step of at most 268,435,456 tokens"),
        (
            [*MODEL, "--tokens", str(10**9), "--seq-len", str(10**9)],
            "--seq-len: 1,000,000,000, but a step of at most",
        ),
        ([*MODEL, "--micro-batch", "17"], "17 sequences at a time, but a step has 16"),
        ([*MODEL, "--state", "int4"], "'int4' is not one of"),
        ([*MODEL, "--objective", "joy"], "'joy' is not one of"),
        ([*MODEL, "--json", "/no/such/place/x.json"], "/no/such/place is no directory"),
        ([*MODEL, "--html", "/no/such/place/x.html"], "--html: /no/such/place is no directory"),
        ([*MODEL, "--html", "/tmp"], "--html: /tmp is a directory"),
        ([*MODEL, "--html", "-"], "--html: name a file"),
        ([*MODEL, "--html", ""], "--html: an empty name; name a file"),
        ([*MODEL, "--json", " "], "--json: an empty name; name a file"),
        ([*MODEL, "--html", "/proc/version_/x"], "is no directory"),
        ([*MODEL, "--html", "x.json", "--json", "x.json"], "--html: the file of --json"),
        ([*MODEL, "--html", "./x.json", "--json", "x.json"], "--html: the file of --json"),
        ([*MODEL, "--compare"], "--compare needs --train-tokens"),
        ([*MODEL, "--train-tokens", "1e9"], "--train-tokens: only with --compare"),
        ([*MODEL, "--gpus", "2"], "--gpus: only with --compare"),
        ([*MODEL, "--compare", "--train-tokens", "nan"], "nan is no number of tokens"),
        ([*MODEL, "--compare", "--train-tokens", "-5"], "-5 is no number of tokens"),
        ([*MODEL, "--compare", "--train-tokens", "1e300"], "1e+300 is no number of tokens"),
        ([*MODEL, "--compare", "--train-tokens", "many"], "Invalid value for '--train-tokens'"),
        (
            [*MODEL, "--compare", "--train-tokens", "1e9", "--price-per-hour", "inf"],
            "inf is no price",
        ),
    ],
)
def test_mistakes_get_one_line_and_status_2(arguments: list[str], message: str) -> None:
    result = run_plan(*arguments)
    assert result.exit_code == 2, result.output
    assert message in unwrapped(result.output)
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_after_all(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    result = run_plan(*MODEL, option, str(tmp_path / "plan"))
    assert result.exit_code == 2
    assert f"{tmp_path / 'plan'} cannot be written: No space left on device" in result.stderr


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_place_that_takes_no_file_is_refused_before_planning(
    option: str, planner: Planner
) -> None:
    result = run_plan(*MODEL, option, "/proc/plan.html")  # where root can write no file either
    assert result.exit_code == 2
    assert f"{option}: /proc/plan.html cannot be written: No such file" in unwrapped(result.output)
    assert not planner.jobs


@pytest.mark.usefixtures("planner")
def test_a_file_is_not_left_behind_or_emptied_by_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("kept")
    for name in ("old.json", "new.json"):
        mistake = run_plan(*MODEL, "--json", str(tmp_path / name), "--machine", "h300")
        assert mistake.exit_code == 2
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.json", "kept")]


@pytest.mark.usefixtures("planner")
def test_sequences_longer_than_the_model_was_made_for_are_told(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    longer = run_plan(*MODEL, "--seq-len", "65536", "--tokens", "65536", "--html", str(page))
    assert longer.exit_code == 0, longer.output
    words = "Sequences of 65,536 tokens, but the model was made for 32,768."
    assert words in longer.stdout
    assert words in page.read_text(encoding="utf-8")  # which others see without the table
    assert "was made for" not in run_plan(*MODEL, "--seq-len", "32768").stdout


def test_a_model_with_no_blocks_is_a_mistake(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Plan:
        raise UnsupportedModel("the model has no repeated blocks")

    monkeypatch.setattr(planning, "make_plan", refuse)
    result = run_plan(*MODEL)
    assert result.exit_code == 2
    assert "no repeated blocks" in result.output


def test_a_base_in_4_bit_under_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    file = tmp_path / "plan.json"
    result = run_plan(
        *("qwen2.5-1.5b", "--machine", "h200-pcie5", "--lora", "8"),
        *("--frozen-weights", "int4", "--device-memory", "12GiB", "--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    assert "frozen weights in int4" in unwrapped(result.stdout)
    assert "expanded weights" in result.stdout
    assert read_plan(file).job.frozen_weights == "int4"


def test_one_card_holds_adapters_and_the_weights_of_their_base() -> None:
    pytest.importorskip("peft")
    result = run_plan(
        *("qwen2.5-1.5b", "--machine", "rtx-4090", "--lora", "8"),
        *("--compare", "--train-tokens", "1e8"),
    )
    assert result.exit_code == 0, result.output
    assert "One GPU holds the model without offloading" in unwrapped(result.stdout)
    assert "2.9 GiB of frozen weights" in unwrapped(result.stdout)


def test_adapters_larger_than_the_model_are_a_mistake() -> None:
    pytest.importorskip("peft")
    result = run_plan("smollm2-135m", "--machine", "h200-pcie5", "--lora", "9999999")
    assert result.exit_code == 2
    assert "--lora 9999999 is more than the model's hidden size, 576" in unwrapped(result.output)


def test_frozen_weights_without_adapters_are_a_mistake() -> None:
    result = run_plan(*MODEL, "--frozen-weights", "int4")
    assert result.exit_code == 2
    assert "--frozen-weights: needs --lora RANK" in unwrapped(result.output)


def test_an_id_of_the_hub_is_planned_from_its_cached_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = offline_cache(tmp_path / "hub", monkeypatch)
    blobs = put_snapshot(cache, "some-org/small")
    (blobs / "config.json").write_text(json.dumps(shape_dict("smollm2-135m")))
    link_snapshot(blobs)
    result = run_plan("some-org/small", "--machine", "rtx-4090")
    assert result.exit_code == 0, result.output
    assert "some-org/small on rtx-4090" in result.stdout
    result = run_plan("some-org/another", "--machine", "rtx-4090")
    assert result.exit_code == 2
    assert "cannot be had from the Hugging Face Hub: it is not in the cache" in result.output
