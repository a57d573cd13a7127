"""`outcore train`: fine-tune a model directory on data files; with nothing named, a demo."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from outcore.cli.output_until_closed import outlive_its_reader
from outcore.cli.report import console_for, stop, write_json
from outcore.errors import BadRow, DoesNotFit, OutcoreError, UnknownFormat

if TYPE_CHECKING:
    from outcore.train.figures import TrainResult
    from outcore.train.settings import TrainSettings

_OF_DEMO = {"seed", "device", "max_steps"}
_LENGTH, _OPTIMIZER, _LORA = "Length", "Optimizer", "LoRA"
_DATA, _LEARNED, _EVALUATION = "Data", "What is learned of it", "Evaluation"
_SAVING, _MACHINE = "Checkpoints and logs", "Machine"


def _option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def train_command(
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A YAML file with the names of these options; what is given here goes first.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID|SHAPE",
            help="A Hugging Face directory (safetensors), an id of the Hub, or the name of a shape "
            "such as smollm2-135m, which gets random weights.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="JSONL, JSON, Parquet, text, or a data set on disk; may be named several times.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Becomes a Hugging Face directory; checkpoints inside."),
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Go on from the newest whole checkpoint.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="A tokenizer other than the model's own.")
    ] = None,
    max_steps: Annotated[
        int | None, _option("Optimizer steps; goes before --epochs.", _LENGTH)
    ] = None,
    epochs: Annotated[float | None, _option("Times through the data (1).", _LENGTH)] = None,
    tokens_per_step: Annotated[
        int | None, _option("Tokens of one optimizer step (32,768).", _LENGTH)
    ] = None,
    seq_len: Annotated[
        int | None, _option("Tokens of a sequence (2,048, or what the model can).", _LENGTH)
    ] = None,
    lr: Annotated[float | None, _option("Learning rate (1e-5; LoRA 2e-4).", _OPTIMIZER)] = None,
    schedule: Annotated[
        str | None, _option("cosine, linear or constant (cosine).", _OPTIMIZER)
    ] = None,
    warmup: Annotated[
        float | None, _option("Steps, or below 1 a part of all of them (0.03).", _OPTIMIZER)
    ] = None,
    min_lr: Annotated[
        float | None, _option("Learning rate at the end, as a part of --lr (0).", _OPTIMIZER)
    ] = None,
    weight_decay: Annotated[float | None, _option("Of matrices (0).", _OPTIMIZER)] = None,
    beta1: Annotated[float | None, _option("AdamW's (0.9).", _OPTIMIZER)] = None,
    beta2: Annotated[float | None, _option("AdamW's (0.95).", _OPTIMIZER)] = None,
    eps: Annotated[float | None, _option("AdamW's (1e-8).", _OPTIMIZER)] = None,
    max_grad_norm: Annotated[
        float | None,
        _option(
            "Clip the global norm to this (1); 0 does not clip, and updates start during the "
            "backward.",
            _OPTIMIZER,
        ),
    ] = None,
    clip_in_two_passes: Annotated[
        bool | None,
        _option(
            "Find the norm in a first pass over each batch, so that no gradient waits for it: a "
            "parameter takes 2 bytes less, a step up to twice as long.",
            _OPTIMIZER,
            "--clip-in-two-passes",
        ),
    ] = None,
    on_non_finite: Annotated[
        str | None, _option("At NaN or infinity: raise, or skip the step (raise).", _OPTIMIZER)
    ] = None,
    seed: Annotated[int | None, _option("Same seed, same run (0).", _OPTIMIZER)] = None,
    deterministic: Annotated[
        bool | None,
        _option(
            "Deterministic algorithms: the same bits on a GPU, also after --resume, need them.",
            _OPTIMIZER,
            "--deterministic",
        ),
    ] = None,
    lora: Annotated[
        bool | None, _option("Train PEFT adapters over frozen weights.", _LORA, "--lora")
    ] = None,
    lora_rank: Annotated[int | None, _option("Rank of the adapters (16).", _LORA)] = None,
    lora_alpha: Annotated[float | None, _option("Their scale (twice the rank).", _LORA)] = None,
    lora_dropout: Annotated[float | None, _option("Dropout before them (0).", _LORA)] = None,
    lora_targets: Annotated[
        list[str] | None,
        _option(
            "A layer that gets one, such as q_proj; may be named several times (every linear "
            "layer).",
            _LORA,
            metavar="NAME",
        ),
    ] = None,
    frozen_weights: Annotated[
        str | None,
        _option("int8 or int4: the base packed, expanded on the device (as they are).", _LORA),
    ] = None,
    row_format: Annotated[
        str | None,
        _option(
            "text, alpaca, messages, sharegpt, preference or prompt-completion (found by fields).",
            _DATA,
        ),
    ] = None,
    loss_on: Annotated[
        str | None, _option("answers, last-answer or all (answers).", _LEARNED)
    ] = None,
    skip_bad_rows: Annotated[
        bool | None,
        _option("Leave malformed rows out instead of stopping.", _DATA, "--skip-bad-rows"),
    ] = None,
    packing: Annotated[
        bool | None,
        _option(
            "Several examples in a sequence, blind to each other (yes).",
            _LEARNED,
            "--packing/--no-packing",
        ),
    ] = None,
    dpo_beta: Annotated[
        float | None, _option("Of preference pairs: DPO's beta (0.1).", _LEARNED)
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        _option("Evaluate on this; may be named several times.", _EVALUATION, metavar="FILE"),
    ] = None,
    held_out: Annotated[
        float | None,
        _option("Evaluate on this part of the data instead, such as 0.01.", _EVALUATION),
    ] = None,
    eval_every: Annotated[
        int | None, _option("Steps between evaluations (at the end only).", _EVALUATION)
    ] = None,
    num_workers: Annotated[
        int | None, _option("Processes that tokenise (as many as help).", _DATA)
    ] = None,
    cache_dir: Annotated[
        str | None, _option("Where tokens are kept (in the output).", _DATA, metavar="DIR")
    ] = None,
    save_every: Annotated[
        int | None,
        _option("Steps between checkpoints (at the end, and when asked to stop).", _SAVING),
    ] = None,
    keep: Annotated[
        int | None, _option("Checkpoints that are kept (2); 0 writes none.", _SAVING)
    ] = None,
    log_every: Annotated[
        int | None, _option("Steps between lines, where there is no terminal (10).", _SAVING)
    ] = None,
    tensorboard: Annotated[
        bool | None,
        _option(
            "Write TensorBoard logs (where it is installed).",
            _SAVING,
            "--tensorboard/--no-tensorboard",
        ),
    ] = None,
    device: Annotated[
        str | None, _option("cuda or cpu; the GPU if there is one.", _MACHINE)
    ] = None,
    device_memory: Annotated[
        str | None, _option("Budget, such as 24GiB (all that is free).", _MACHINE, metavar="SIZE")
    ] = None,
    host_memory: Annotated[
        str | None, _option("Budget, such as 100GiB (all that is free).", _MACHINE, metavar="SIZE")
    ] = None,
    disk: Annotated[
        str | None,
        _option("A directory that weights and state may go to.", _MACHINE, metavar="PATH[:SIZE]"),
    ] = None,
    dtype: Annotated[str | None, _option("bf16 or fp32 (bf16; CPU: fp32).", _MACHINE)] = None,
    state_format: Annotated[
        str | None, _option("fp32, compact or minimal (fp32).", _MACHINE)
    ] = None,
    micro_batch: Annotated[
        int | None, _option("Sequences that a block works on at a time (the plan's).", _MACHINE)
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout."),
    ] = None,
) -> None:
    """Fine-tune a model that need not fit in GPU memory.

    A plan for this machine is made and printed first. Ctrl-C (or SIGTERM, or a terminal that
    closes) finishes the step, writes a checkpoint and exits with 0; --resume then goes on to the
    same bits. Without any option a small model learns to add, as a demonstration.

    In parentheses: what holds where an option is not given.

    Examples: a chat model on your own chats; adapters only; go on after an interruption:

        outcore train --model ./Qwen2.5-7B --data chats.jsonl --output tuned --epochs 2

        outcore train --model ./Qwen2.5-7B --data chats.jsonl --output adapters --lora

        outcore train --config tuned.yaml --resume
    """
    given = {
        name: value
        for name, value in locals().items()
        if name not in ("config", "json_file") and value is not None and value != []
    }
    console = console_for(json_file)
    outlive_its_reader(console)
    with console.status("starting torch"):
        import transformers

        from outcore.train import settings as train_settings

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    if config is None and not set(given) - _OF_DEMO:
        _demo(console, json_file, given)
        return
    try:
        from_file = {} if config is None else train_settings.read_settings(config)
        settings = train_settings.settings_of(train_settings.overridden(from_file, given))
    except (ValueError, TypeError) as error:
        stop(str(error))
    result = _train(console, settings)
    _tell(console, result)
    write_json(_describe(result), json_file)


def _train(console: Console, settings: TrainSettings) -> TrainResult:
    from outcore.cli.warning_lines import warnings_told
    from outcore.train.display import display_for
    from outcore.train.run import train

    display = display_for(console, log_every=settings.log_every)
    try:
        with warnings_told(display.message):
            return train(settings, display)
    except DoesNotFit as error:
        stop(_as_options(error.command_line, settings.dtype))
    except UnknownFormat as error:
        stop(str(error))
    except BadRow as error:
        stop(f"{error}; --skip-bad-rows leaves such rows out")
    except (OutcoreError, ValueError) as error:
        stop(str(error))


def _as_options(of_plan: str, dtype: str | None) -> str:
    """Return what `outcore plan` would be told in the words of this command."""
    # That picks the type for a format of state; here it may have been given.
    with_dtype = r"\1 --dtype bf16" if dtype == "fp32" else r"\1"
    words = re.sub(r"--state (\w+)", rf"--state-format {with_dtype}", of_plan)
    return words.replace("--tokens ", "--tokens-per-step ")


def _tell(console: Console, result: TrainResult) -> None:
    where = escape(str(result.output))
    if result.is_complete:
        console.print(
            f"[bold green]done:[/] {result.step:,} steps in {result.seconds:,.0f} s; the model is "
            f"in {where}, the report in {where}/report.html",
            soft_wrap=not console.is_terminal,
        )
    else:
        when = "before training"
        if result.is_prepared:
            when = f"after step {result.step:,} of {result.num_steps:,}"
        what_next = "--resume goes on from there" if result.is_resumable else "the model is written"
        console.print(f"[bold]stopped[/] {when}; {what_next}")


def _describe(result: TrainResult) -> dict[str, Any]:
    return {
        "output": str(result.output),
        "step": result.step,
        "num_steps": result.num_steps,
        "stopped_by": result.stopped_by,
        "loss": _finite(result.loss),
        "eval_loss": _finite(result.eval_loss),
        "seconds": result.seconds,
        "tiers": [asdict(tier) for tier in result.tiers],
        "device_peak_bytes": result.device_peak_bytes,
    }


def _finite(loss: float | None) -> float | None:
    """JSON has no word for the loss of a step that was skipped."""
    return loss if loss is not None and math.isfinite(loss) else None


def _demo(console: Console, json_file: str | None, given: dict[str, Any]) -> None:
    """Teach addition, and ask for sums that were held out before and after."""
    import torch

    from outcore.named_device import named_device
    from outcore.train import demo
    from outcore.units import format_bytes

    try:
        device = str(named_device(given.get("device")))
    except ValueError as error:
        stop(str(error))
    if device == "cpu":  # products this small lose more to idle threads than they gain
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="outcore-demo-") as folder:
        job = demo.make_demo(
            Path(folder),
            device=device,
            seed=given.get("seed", 0),
            num_steps=given.get("max_steps"),
        )
        console.print(
            f"A small Llama takes [bold]{format_bytes(job.training_bytes)}[/] to train; the "
            f"{escape(device)} device gets [bold]{job.settings.device_memory}[/]. It learns to add "
            f"from {10 ** (2 * demo.NUM_DIGITS) - demo.NUM_HELD_OUT:,} problems; "
            f"{len(job.held_out):,} others are held out. What is written goes to a temporary "
            "folder, and is removed."
        )
        before = job.accuracy(job.settings.model)
        console.print(f"Held-out problems solved before: [bold]{before:.1%}[/]")
        result = _train(console, job.settings)
        if not result.is_complete:
            console.print("[bold]stopped[/]")
            raise typer.Exit(0)
        answers = job.answers(str(result.output))
        after = job.share_right(answers)
        for (problem, right), answer in list(zip(job.held_out, answers, strict=True))[:5]:
            mark = "[green]right[/]" if answer == right else "[red]wrong[/]"
            console.print(f"  {demo.readable(problem, answer)}  {mark}")
    peak = result.device_peak_bytes
    passed = after >= demo.NEEDED_ACCURACY
    console.print(
        f"[bold {'green' if passed else 'red'}]Held-out problems solved: {before:.1%} before, "
        f"{after:.1%} after {result.step} steps in {result.seconds:.0f} s[/]; device peak "
        f"{format_bytes(peak)}, {peak / job.training_bytes:.0%} of the training bytes"
        + ("" if passed else f" ({demo.NEEDED_ACCURACY:.0%} were expected)")
    )
    report = {
        **_describe(result),
        "accuracy_before": before,
        "accuracy_after": after,
        "training_bytes": job.training_bytes,
    }
    del report["output"]
    write_json(report, json_file)
    if not passed:
        raise typer.Exit(1)
