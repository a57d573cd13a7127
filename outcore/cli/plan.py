"""`outcore plan MODEL`: where everything would live and what a step would cost, before any run."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outcore.cli import planning
from outcore.cli.plan_answer import Answer, show, write_files
from outcore.cli.plan_options import (
    HERE,
    budgets,
    check_compare,
    make_job,
    within_machine,
)
from outcore.cli.report import check_file, console_for, stop
from outcore.errors import DoesNotFit, OutcoreError, UnsupportedModel
from outcore.planning.plan import Budgets, Job, Plan
from outcore.planning.within_machine import with_asked_memory

if TYPE_CHECKING:
    from outcore.machine.machine import Machine
    from outcore.model_spec import ModelSpec
    from outcore.planning.compare import Comparison
    from outcore.planning.smaller_budget import SmallerBudget

_JOB, _CLIPPING, _MEMORY = "The job", "Clipping", "The machine"
_FILES, _COMPARE = "Files", "Offload, or more GPUs?"


class StateFormat(str, Enum):
    """How optimizer state is stored."""

    fp32 = "fp32"
    compact = "compact"
    minimal = "minimal"


class FrozenWeights(str, Enum):
    """How frozen matrices are stored."""

    int8 = "int8"
    int4 = "int4"


class Objective(str, Enum):
    """What the plan is best at."""

    speed = "speed"
    memory = "memory"


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory, an id of the Hub, a config.json, or the name of a "
            "shape such as qwen2.5-7b. No weights are needed or fetched.",
            show_default=False,
        ),
    ],
    machine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_MEMORY,
            help="A machine of the catalogue, such as rtx-4090, h200-pcie5 or gh200; "
            "here measures this one.",
        ),
    ] = HERE,
    tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, rich_help_panel=_JOB, help="Tokens in a step: whole sequences."
        ),
    ] = 32768,
    seq_len: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=_JOB, help="Tokens in a sequence.")
    ] = 2048,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=_MEMORY,
            help="Device memory to use, such as 24GiB; all if unset.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=_MEMORY,
            help="Host memory to use, such as 100GiB; all if unset. A machine of the catalogue may "
            "have more than usual.",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="PATH:SIZE",
            rich_help_panel=_MEMORY,
            help="A directory for scratch files and how much they may hold.",
        ),
    ] = None,
    state: Annotated[
        StateFormat,
        typer.Option(
            metavar="FORMAT",
            rich_help_panel=_JOB,
            help="Optimizer state: fp32 (exact, 12 bytes a parameter with the weight), compact "
            "(about 5) or minimal (about 4). It is never changed for you.",
        ),
    ] = StateFormat.fp32,
    lora: Annotated[
        int | None,
        typer.Option(
            metavar="RANK",
            min=1,
            rich_help_panel=_JOB,
            help="Train LoRA adapters of this rank on all linear layers; the base is frozen.",
        ),
    ] = None,
    frozen_weights: Annotated[
        FrozenWeights | None,
        typer.Option(
            metavar="FORMAT",
            rich_help_panel=_JOB,
            help="With --lora: the base's matrices as int8 or int4, expanded on the device. "
            "This changes numbers; unset, they stay as they are.",
        ),
    ] = None,
    objective: Annotated[
        Objective,
        typer.Option(
            metavar="WHAT",
            rich_help_panel=_JOB,
            help="speed: the fastest plan; memory: the least device memory at up to 10% more time.",
        ),
    ] = Objective.speed,
    no_clipping: Annotated[
        bool,
        typer.Option(
            "--no-clipping",
            rich_help_panel=_CLIPPING,
            help="No clipping: updates start during the backward.",
        ),
    ] = False,
    clip_in_two_passes: Annotated[
        bool,
        typer.Option(
            "--clip-in-two-passes",
            rich_help_panel=_CLIPPING,
            help="Clipping without gradients that wait: a first pass finds the norm.",
        ),
    ] = False,
    masked: Annotated[
        bool,
        typer.Option(
            "--masked", rich_help_panel=_JOB, help="Sequences hold several documents, or padding."
        ),
    ] = False,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints",
            rich_help_panel=_JOB,
            help="Count memory for checkpoints written while training goes on.",
        ),
    ] = False,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=_JOB,
            help="Sequences at a time inside a block; the planner's if unset.",
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            rich_help_panel=_FILES,
            help="Write the plan as JSON; - for stdout.",
        ),
    ] = None,
    html_file: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            rich_help_panel=_FILES,
            help="Write a page with the step's timeline, for a browser.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            rich_help_panel=_COMPARE,
            help="Compare with GPUs that hold the model; the others below need it.",
        ),
    ] = False,
    train_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N", rich_help_panel=_COMPARE, help="Tokens to train on, such as 1e9."
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            metavar="DOLLARS",
            min=0,
            rich_help_panel=_COMPARE,
            help="Price of one GPU; the catalogue's if unset.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=_COMPARE,
            help="Machines that offload, data parallel; 1 if unset.",
        ),
    ] = None,
) -> None:
    """Say where every tensor of MODEL would live, and what a training step would cost.

    Nothing is trained or allocated. The table has the home of each block's weights, state and
    gradients, the peak of each memory, the predicted speed, the lane that binds, and how many
    tokens a step would hide the copies. The exit status is 1 if the job cannot fit; the message
    then has what is missing and the nearest change that fits.

    Examples: this machine; a card that is not here, with the page; three tiers; offload, or more
    GPUs? and adapters over a base in 4 bit:

        outcore plan qwen2.5-7b

        outcore plan llama-3.1-8b --machine rtx-4090 --html plan.html

        outcore plan qwen2.5-32b --machine h200-pcie5 --state compact --disk /scratch:500GiB

        outcore plan llama-3.1-8b --machine rtx-4090 --compare --train-tokens 1e9

        outcore plan qwen2.5-72b --machine rtx-4090 --lora 16 --frozen-weights int4
    """
    console = console_for(json_file)
    check_file(html_file, "--html")
    if html_file and json_file and Path(html_file).resolve() == Path(json_file).resolve():
        raise typer.BadParameter("the file of --json; name another", param_hint="--html")
    check_compare(compare, train_tokens, price_per_hour, gpus)
    if frozen_weights is not None and lora is None:
        raise typer.BadParameter(
            "needs --lora RANK: a model that is trained whole has no frozen weights",
            param_hint="--frozen-weights",
        )
    if no_clipping and clip_in_two_passes:
        raise typer.BadParameter("contradicts --no-clipping", param_hint="--clip-in-two-passes")
    job = make_job(
        tokens=tokens,
        seq_len=seq_len,
        clipping="two-pass" if clip_in_two_passes else "none" if no_clipping else "waiting",
        state_format=state.value,
        frozen_weights=None if frozen_weights is None else frozen_weights.value,
        micro_batch=micro_batch,
        objective=objective.value,
        is_masked=masked,
        checkpoints=checkpoints,
        budgets=budgets(device_memory, host_memory, disk, machine),
    )
    with console.status("planning" if machine != HERE else "measuring this machine and planning"):
        spec = _find_model(model, lora)
        chosen = with_asked_memory(_find_machine(machine, job.budgets.disk_path), job.budgets)
        job = within_machine(job, chosen)
        chosen = _with_parts(chosen, job.budgets)
        job = replace(job, dtype=planning.default_dtype(chosen, job.state_format))
        plan = _make_plan(spec, chosen, job)
        answer = Answer(
            plan=plan,
            machine=chosen,
            smaller=_smaller_budget(spec, chosen, plan),
            comparison=(
                _compare(plan, chosen, spec, train_tokens, price_per_hour, gpus)
                if compare
                else None
            ),
            longest_sequence=spec.longest_sequence,
        )
    # First: a reader of the table may leave before its end (| head).
    write_files(answer, None if json_file == "-" else json_file, html_file)
    show(answer, console)
    if json_file == "-":
        write_files(answer, json_file, None)
    if html_file is not None:
        console.print(f"[dim]the page: {escape(html_file)}[/]")


def _find_model(source: str, lora_rank: int | None) -> ModelSpec:
    try:
        if lora_rank is not None:
            return planning.lora_spec(source, lora_rank)
        return planning.model_spec(source)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(_line(error), param_hint="MODEL") from None


def _find_machine(name: str, disk: str | None) -> Machine:
    try:
        return planning.machine_named(name, disk)
    except (ValueError, LookupError) as error:
        raise typer.BadParameter(_line(error), param_hint="--machine") from None
    except (OutcoreError, OSError, RuntimeError) as error:
        stop(f"this machine could not be measured: {error}. Name one: --machine h200-pcie5")


def _with_parts(machine: Machine, asked: Budgets) -> Machine:
    try:
        return planning.with_parts(machine, asked.device_bytes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device-memory") from None


def _line(error: Exception) -> str:
    """Return an error's message; a KeyError's own text is quoted."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _make_plan(spec: ModelSpec, machine: Machine, job: Job) -> Plan:
    try:
        return planning.make_plan(spec, machine, job)
    except UnsupportedModel as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from None
    except OutcoreError as error:
        # An answer, not a mistake: this job does not fit this machine.
        console = Console(stderr=True, highlight=False)
        console.print(
            f"[bold red]refused:[/] {escape(_refusal(error))}", soft_wrap=not console.is_terminal
        )
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _refusal(error: OutcoreError) -> str:
    """Return why there is no plan, with the options of this command for what would fit."""
    return error.command_line if isinstance(error, DoesNotFit) else str(error)


def _smaller_budget(spec: ModelSpec, machine: Machine, plan: Plan) -> SmallerBudget | None:
    """Return the plan for the next smaller device budget, or why there is none."""
    from outcore.planning.smaller_budget import SmallerBudget, next_smaller_bytes
    from outcore.views.words import budget_bytes

    size = next_smaller_bytes(plan, budget_bytes(plan, machine).get("device"))
    if size is None:
        return None
    job = replace(plan.job, budgets=replace(plan.job.budgets, device_bytes=size))
    try:
        machine = planning.with_parts(machine, size)
        return SmallerBudget(device_bytes=size, plan=planning.make_plan(spec, machine, job))
    except OutcoreError as error:
        return SmallerBudget(device_bytes=size, refusal=_refusal(error))


def _compare(
    plan: Plan,
    machine: Machine,
    spec: ModelSpec,
    train_tokens: float | None,
    price_per_hour: float | None,
    gpus: int | None,
) -> Comparison:
    from outcore.planning.compare import compare

    assert train_tokens is not None
    return compare(
        plan,
        machine,
        num_parameters=spec.num_parameters,
        hidden_size=spec.hidden_size,
        train_tokens=train_tokens,
        num_frozen=spec.frozen_parameters,
        frozen_bytes=spec.frozen_bytes(plan.job.frozen_weights),
        num_gpus=gpus or 1,
        price_per_hour=price_per_hour,
    )
