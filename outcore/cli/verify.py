"""`outcore verify MODEL`: does every placement train this model to the same bits, here?"""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from outcore.cli.machine import machine_facts, machine_line
from outcore.cli.report import console_for, shown_while_filled, stop, write_json
from outcore.cli.verify_table import VerifyTable
from outcore.determinism import ask_cublas_for_it
from outcore.errors import OutcoreError

if TYPE_CHECKING:
    from outcore.verify import ModelSource, Placement, VerifyJob


class Precision(str, Enum):
    """What the blocks compute in."""

    fp32 = "fp32"
    bf16 = "bf16"


def verify_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory (safetensors), an id of the Hub, or the name of a shape "
            "such as smollm2-135m, which gets random weights.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the GPU if there is one.")
    ] = None,
    dtype: Annotated[
        Precision | None,
        typer.Option(
            metavar="TYPE",
            help="bf16 (with an fp32 master) or fp32 throughout; bf16 on a GPU, fp32 on the CPU.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Take the first N layers only, so that the resident run fits."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Optimizer steps of every run.")
    ] = 20,
    sequences: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences in a step.")] = 4,
    seq_len: Annotated[int, typer.Option(metavar="N", min=4, help="Tokens in a sequence.")] = 32,
    micro_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sequences that a block works on at a time.")
    ] = 2,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="A directory for scratch files: adds placements with a disk tier."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Only the placements with TEXT in their name; may be given several times.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout."),
    ] = None,
) -> None:
    """Train MODEL in every placement and compare every bit with training in device memory.

    Each run has clipping, a schedule, weight decay and the model's own dropout, on
    random tokens; nothing is written to MODEL. The last row compares with plain Hugging Face and
    torch.optim.AdamW, which agree to rounding. The exit status is 1 if anything differs.

    Examples: minutes without a GPU; your own weights; blocks of 7B on the GPU:

        outcore verify smollm2-135m --layers 2 --steps 5

        outcore verify ./my-model --json result.json

        outcore verify qwen2.5-7b --layers 8 --seq-len 512
    """
    console = console_for(json_file)
    with console.status("starting torch"):
        chosen_device = _start_torch(device)
        _refuse_no_directory(disk)
        chosen = _choose_placements(disk is not None, only or [])
        source = _find_model(model, layers)
        _refuse_too_large(source, chosen_device)
    source = _fetched(source)  # no spinner over the bars of a download
    with console.status("preparing"):
        job = _make_job(chosen_device, dtype, steps, sequences, seq_len, micro_batch, disk)
        facts = machine_facts()
    report = _describe(source, job, facts)
    _print_header(console, source, job, facts)
    try:
        passed = _run(console, source, job, chosen, report)
    except (OutcoreError, ValueError) as error:
        stop(str(error))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        stop(
            f"no memory is left for a step of {sequences} × {seq_len} tokens beside the model; "
            "fewer --sequences, a shorter --seq-len or fewer --layers take less"
        )
    write_json(report, json_file)
    if not passed:
        raise typer.Exit(1)


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    # The CPU's allocator has no exception of its own.
    is_of_host = "can't allocate memory" in str(error)
    return is_of_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _start_torch(device: str | None) -> str:
    """Return the device to use, with deterministic algorithms where they are a choice."""
    ask_cublas_for_it()
    import torch
    import transformers

    from outcore.named_device import named_device

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        chosen = named_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    if chosen.type == "cpu":
        return "cpu"
    torch.use_deterministic_algorithms(True)
    return str(chosen)


def _find_model(name: str, layers: int | None) -> ModelSource:
    from outcore.verify import find_model

    try:
        source = find_model(name, num_layers=layers)
        source.num_parameters()  # or its configuration makes no model
        return source
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from None


def _fetched(source: ModelSource) -> ModelSource:
    try:
        return source.fetched()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from None


def _refuse_too_large(source: ModelSource, device: str) -> None:
    import torch

    from outcore.store.memory_limits import available_host_bytes
    from outcore.units import format_bytes

    needed = source.resident_bytes()
    free = available_host_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free is None or needed <= free:
        return
    fitting = source.layers_that_fit(free)
    remedy = f"--layers {fitting} fits" if fitting >= 2 else "Not even two layers fit"
    stop(
        f"the run to compare with is resident, and {source.name} with {source.num_layers} layers "
        f"then needs about {format_bytes(needed)}; {format_bytes(free)} are free. {remedy}."
    )


def _refuse_no_directory(disk: str | None) -> None:
    """Before minutes of training: the placements with a disk tier come last."""
    if disk is None:
        return
    from outcore.store.disk_budget import disk_ledger, parse_disk

    try:
        budget = parse_disk(disk)
        disk_ledger(budget)
        if not budget.path.is_dir():
            raise ValueError(f"disk {budget.path} is no directory; make it, or name another")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--disk") from None


def _choose_placements(has_disk: bool, texts: list[str]) -> list[Placement]:
    from outcore.verify import disk_placements, placements

    known = placements() + (disk_placements() if has_disk else [])
    names = [placement.name for placement in known]
    for text in texts:
        if not any(text in name for name in names):
            raise typer.BadParameter(
                f"no placement's name has {text!r}: {'; '.join(names)}", param_hint="--only"
            )
    return [place for place in known if not texts or any(text in place.name for text in texts)]


def _make_job(
    device: str,
    dtype: Precision | None,
    steps: int,
    sequences: int,
    seq_len: int,
    micro_batch: int,
    disk: str | None,
) -> VerifyJob:
    import torch

    from outcore.verify import VerifyJob

    if dtype is None:
        dtype = Precision.fp32 if device == "cpu" else Precision.bf16
    return VerifyJob(
        device=device,
        dtype=torch.float32 if dtype is Precision.fp32 else torch.bfloat16,
        steps=steps,
        sequences=sequences,
        seq_len=seq_len,
        micro_batch=min(micro_batch, sequences),
        disk=disk,
    )


def _describe(source: ModelSource, job: VerifyJob, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": source.name,
        "num_layers": source.num_layers,
        "num_parameters": source.num_parameters(),
        "machine": facts,
        "job": {**asdict(job), "dtype": str(job.dtype).removeprefix("torch.")},
    }


def _print_header(
    console: Console, source: ModelSource, job: VerifyJob, facts: dict[str, Any]
) -> None:
    dtype = "fp32" if job.dtype.itemsize == 4 else "bf16 with an fp32 master"
    console.print(f"[dim]{escape(machine_line(facts))}[/]")
    console.print(
        f"[bold]{escape(source.name)}[/]: {source.num_layers} layers, "
        f"{source.num_parameters() / 1e6:,.1f} M parameters, {dtype}, on {job.device}; "
        f"{job.steps} steps of {job.sequences} × {job.seq_len} tokens"
    )


def _say(console: Console, line: str) -> None:
    """Where nobody watches the table fill, a line for each row: it may be minutes to the next."""
    if not console.is_terminal:
        console.print(line)


def _run(
    console: Console,
    source: ModelSource,
    job: VerifyJob,
    chosen: list[Placement],
    report: dict[str, Any],
) -> bool:
    """Fill the table and the report; return whether everything is as it should be."""
    from outcore.verify import RESIDENT, check_against_plain_torch, train, verify

    def make() -> Any:
        return source.make(job.device)

    table = VerifyTable([placement.name for placement in chosen])
    report["placements"] = []
    with shown_while_filled(table, console):
        reference = train(make, RESIDENT, job)
        table.resident_done(reference)
        _say(console, f"{table.progress}, resident: {reference.seconds:.1f} s")
        for comparison in verify(make, job, chosen, reference=reference):
            table.placement_done(comparison)
            verdict = "same bits" if comparison.is_exact else "differs"
            _say(
                console,
                f"{table.progress}, {comparison.name}: {verdict}, {comparison.seconds:.1f} s",
            )
            report["placements"].append({**asdict(comparison), "is_exact": comparison.is_exact})
        plain = check_against_plain_torch(make, job)
        table.plain_torch_done(plain)
    worst_name, worst = plain.worst
    report["losses"] = reference.losses
    report["plain_torch"] = {
        **asdict(plain),
        "worst_parameter": worst_name,
        "worst_relative_difference": worst,
        "too_far": plain.too_far,
        "is_close": plain.is_close,
    }
    report["passed"] = table.has_passed
    console.print(table.explanation())
    return table.has_passed
