"""The command line: `outcore`, with one file a command.

Nothing here imports torch before a command runs, so that help and mistakes answer at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich import print as rich_print

import outcore
from outcore.cli import bench, plan, probe, train, verify
from outcore.cli.output_until_closed import end_with_standard_output

__all__ = ["app", "main"]

_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")  # NVIDIA's and AMD's drivers

app = typer.Typer(
    name="outcore",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("train")(train.train_command)
app.command("plan")(plan.plan_command)
app.command("verify")(verify.verify_command)
app.command("probe")(probe.probe_command)
app.add_typer(bench.app, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        rich_print(f"outcore {outcore.__version__}")
        raise typer.Exit


@app.callback()
def _outcore(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train Hugging Face models that live off the GPU, bit-exact and at native speed.

    `outcore train` fine-tunes a model directory on a data file; in Python the same is
    outcore.offload and outcore.AdamW. The other commands plan it for any machine, and check and
    measure it on this one. `outcore COMMAND --help` has examples.
    """


def main() -> None:
    """Run the command that the arguments name."""
    if not any(Path(node).exists() for node in _GPU_NODES):
        # Threads that wait for work would spin on the cores that others compute with: on a busy
        # machine several times slower. Read when torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not sys.warnoptions:  # names that libraries will change one day, for those who call them
        warnings.simplefilter("ignore", FutureWarning)
    end_with_standard_output()
    try:
        app()
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # what is still buffered fails here, where it can be told
