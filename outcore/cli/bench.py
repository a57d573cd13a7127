"""`outcore bench train`: speed and memory of Outcore on this machine, beside its peers."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from outcore.cli.bench_table import BenchTable, ratio_to
from outcore.cli.machine import machine_facts, machine_line
from outcore.cli.report import console_for, shown_while_filled, stop, write_json

if TYPE_CHECKING:
    from outcore.bench.job import BenchJob, BenchRow

# A CPU does some 10^11 operations a second: more than this takes minutes a step.
MOST_CPU_STEP_FLOPS = 5e12
OUTCORE = "outcore"
_PLACES = "Outcore's memory"

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Measure Outcore on this machine."
)


class Home(str, Enum):
    """Where tensors live between uses."""

    host = "host"
    device = "device"


class Activations(str, Enum):
    """What happens to a block's activations."""

    auto = "auto"
    keep = "keep"
    recompute = "recompute"


@app.callback()
def _bench() -> None:
    """Measure Outcore on this machine."""


@app.command("train")
def train_command(
    shape: Annotated[
        str,
        typer.Option(
            metavar="SHAPE|DIR|ID",
            help="A shape by name, a directory with a config.json, or an id of the Hub; weights "
            "are random.",
        ),
    ] = "qwen2.5-7b",
    sequences: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences in a step.")] = 16,
    seq_len: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in a sequence.")] = 2048,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_PLACES, help="Budget, such as 24GiB; all if unset."
        ),
    ] = None,
    weights: Annotated[
        Home,
        typer.Option(
            metavar="HOME", rich_help_panel=_PLACES, help="Block weights: on host or device."
        ),
    ] = Home.host,
    state: Annotated[
        Home,
        typer.Option(
            metavar="HOME", rich_help_panel=_PLACES, help="Optimizer state: on host or device."
        ),
    ] = Home.host,
    activations: Annotated[
        Activations,
        typer.Option(
            metavar="WHAT",
            rich_help_panel=_PLACES,
            help="Activations: keep, recompute, or auto, which keeps what fits.",
        ),
    ] = Activations.auto,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Sequences at a time; each system's own best if unset."
        ),
    ] = None,
    num_slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Device buffers that Outcore's weights pass through; 3 if unset.",
        ),
    ] = None,
    clip: Annotated[
        float, typer.Option(metavar="NORM", help="Clip the global gradient norm to this.")
    ] = 1.0,
    no_clip: Annotated[
        bool, typer.Option("--no-clip", help="No clipping: updates start during the backward.")
    ] = False,
    tie: Annotated[
        bool, typer.Option("--tie/--no-tie", help="Share embedding and head weights.")
    ] = False,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Other systems, with commas: native, torchao, roundpipe, deepspeed.",
        ),
    ] = "",
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Timed steps.")] = 5,
    warmup: Annotated[int, typer.Option(metavar="N", min=1, help="Steps before those.")] = 3,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write raw figures as JSON; - for stdout."),
    ] = None,
) -> None:
    """Time training steps of a model shape with random weights, each system in its own process.

    TFLOPS count 6 × (block + head parameters) × tokens plus causal attention at half; the
    embedding table and recomputation never count. A step is forward, backward, clipping and
    update. A system that is not installed, or fails, becomes a row with the reason. The exit
    status is 1 if Outcore itself fails.

    Examples: as in the README; beside two other systems on the same job; without a GPU:

        outcore bench train --shape qwen2.5-7b --device-memory 24GiB --json results.json

        outcore bench train --shape qwen2.5-3b --no-clip --peers native,torchao

        outcore bench train --shape smollm2-135m --sequences 2 --seq-len 128
    """
    console = console_for(json_file)
    systems = [OUTCORE, *_peers(peers)]
    _check_size(device_memory)
    if not 0 < clip < float("inf"):
        raise typer.BadParameter(
            f"{clip:g} is no norm to clip to; --no-clip does not clip", param_hint="--clip"
        )
    with console.status("starting torch"):
        job = _make_job(
            config=_config(shape, tie),
            sequences=sequences,
            seq_len=seq_len,
            steps=steps,
            warmup_steps=warmup,
            max_grad_norm=None if no_clip else clip,
            micro_batch=micro_batch,
            outcore_options={
                "device_memory": device_memory,
                "weights": weights.value,
                "state": state.value,
                "activations": activations.value,
                **({} if num_slots is None else {"num_slots": num_slots}),
            },
        )
        step_flops = _step_flops(shape, job)
        facts = machine_facts()
    report = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shape": shape,
        "machine": facts,
        "job": asdict(job),
        "step_flops": step_flops,
        "systems": [],
    }
    _print_header(console, shape, job, facts, step_flops)
    outcore_ran = _run(console, systems, job, report, json_file)
    if not outcore_ran:
        raise typer.Exit(1)


def _peers(names: str) -> list[str]:
    from outcore.bench.peers import peer_names

    chosen = [name.strip() for name in names.split(",") if name.strip()]
    known = [name for name in peer_names() if name != OUTCORE]
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(
                f"no peer named {name!r}; known: {', '.join(known)}", param_hint="--peers"
            )
    return list(dict.fromkeys(chosen))


def _check_size(device_memory: str | None) -> None:
    from outcore.units import parse_budget

    if device_memory is not None:
        try:
            parse_budget(device_memory, what="device memory")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--device-memory") from None


def _config(shape: str, tie: bool) -> dict[str, Any]:
    """Return the configuration of a shape, a directory or an id of the Hub, as plain values."""
    from outcore.model_directory import config_directory
    from outcore.shapes import shape_dict, shape_names

    if shape in shape_names() and not Path(shape).is_dir():
        return {**shape_dict(shape), "tie_word_embeddings": tie}
    try:
        directory = config_directory(shape)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shape") from None
    if not directory.is_dir():
        raise typer.BadParameter(
            f"{shape!r} is neither a shape, nor a directory, nor an id of the Hub (org/name). "
            f"Shapes: {', '.join(shape_names())}.",
            param_hint="--shape",
        )
    if not (directory / "config.json").is_file():
        raise typer.BadParameter(f"{shape} has no config.json", param_hint="--shape")
    return {**_checked_config(directory / "config.json"), "tie_word_embeddings": tie}


def _checked_config(file: Path) -> dict[str, Any]:
    from outcore.model_config import read_config

    try:
        read_config(file)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--shape") from None
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _make_job(**fields: Any) -> BenchJob:
    from outcore.bench.job import BenchJob

    try:
        return BenchJob(**fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _step_flops(shape: str, job: BenchJob) -> float:
    """Return what a step is worth, after refusing what a CPU would take hours for."""
    import torch

    from outcore.bench.flops import step_flops

    try:
        flops = step_flops(job.config, job.sequences, job.seq_len)
    except (ValueError, KeyError) as error:
        raise typer.BadParameter(f"{shape}: {error}", param_hint="--shape") from None
    if not torch.cuda.is_available() and flops > MOST_CPU_STEP_FLOPS:
        stop(
            f"torch sees no GPU here, and a step of this job is {flops / 1e12:,.1f} TFLOP: minutes "
            "to hours on a CPU. To try the command: outcore bench train --shape smollm2-135m "
            "--sequences 2 --seq-len 128"
        )
    return flops


def _print_header(
    console: Console, shape: str, job: BenchJob, facts: dict[str, Any], step_flops: float
) -> None:
    clipping = "no clipping" if job.max_grad_norm is None else f"clipped to {job.max_grad_norm:g}"
    options = [f"{name} {value}" for name, value in job.outcore_options.items() if value]
    console.print(f"[dim]{escape(machine_line(facts))}[/]")
    console.print(
        f"[bold]{escape(shape)}[/]: {job.sequences} × {job.seq_len} tokens a step, "
        f"{step_flops / 1e12:,.3g} TFLOP, {clipping}"
    )
    console.print(f"[dim]outcore: {escape(', '.join(options).replace('_', ' '))}[/]")
    if not facts["gpus"]:
        console.print("[yellow]No GPU: this exercises the code, its figures say little.[/]")


def _run(
    console: Console,
    systems: list[str],
    job: BenchJob,
    report: dict[str, Any],
    json_file: str | None,
) -> bool:
    """Run the systems and fill the table and the report; return whether Outcore ran."""
    from outcore.bench.job import BenchResult
    from outcore.bench.peers.runner import run_peers

    rows: list[BenchRow] = []
    with shown_while_filled(BenchTable(systems, rows), console):
        for row in run_peers(systems, job):
            rows.append(row)
            report["systems"].append({**asdict(row), "outcore_ratio": ratio_to(row, rows)})
            if json_file != "-":  # after each row, so that an interrupted run keeps what it has
                write_json(report, json_file)
    if json_file == "-":
        write_json(report, json_file)
    return isinstance(rows[0], BenchResult)
