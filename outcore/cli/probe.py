"""`outcore probe`: what this machine can do, measured once and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from outcore.cli.probe_table import catalogue_table, report_table
from outcore.cli.report import console_for, stop, write_json
from outcore.errors import OutcoreError

if TYPE_CHECKING:
    from outcore.machine.probe import ProbeReport

Step = Callable[[str, int, int], None]


def probe_command(
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A folder on the disk to measure; if unset, the system's temporary one.",
        ),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again, also if a report is kept.")
    ] = False,
    list_machines: Annotated[
        bool, typer.Option("--list", help="Show the machines that are known by name.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all figures as JSON; - for stdout."),
    ] = None,
) -> None:
    """Measure copies, host memory, disk and arithmetic of this machine, in under a minute.

    The report is kept for this hardware, driver and torch; the next call shows it at once, with the
    memory that is free by then. The disk is written to for seconds (30 to 50 GB on a fast one), in
    a file of 16 GiB at most that has no name: nothing is left behind. Without a GPU the CPU is
    measured as the device.

    Examples: with the disk that training would use; the machines that plans can be made for:

        outcore probe --disk /mnt/nvme --json machine.json

        outcore probe --list
    """
    console = console_for(json_file)
    if list_machines:
        if disk is not None or refresh:
            raise typer.BadParameter(
                "measures nothing: leave --disk and --refresh out", param_hint="--list"
            )
        _list(console, json_file)
        return
    report = _probe(console, disk, refresh)
    console.print(report_table(report))
    write_json(report.to_dict(), json_file)


def _probe(console: Console, disk: str | None, refresh: bool) -> ProbeReport:
    with console.status("starting torch"):
        from outcore.machine.probe import probe
    try:
        with shown_steps(console) as step:
            return probe(disk=disk, refresh=refresh, progress=step)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--disk") from None
    except OutcoreError as error:
        stop(str(error))


@contextlib.contextmanager
def shown_steps(console: Console) -> Iterator[Step]:
    """Yield what shows a step: a bar on a terminal, a line each elsewhere."""
    if not console.is_terminal:
        yield lambda name, number, total: console.print(f"measuring {name} ({number} of {total})")
        return
    columns = (
        TextColumn("measuring {task.description:<18}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda name, number, total: bar.update(
            task, description=name, completed=number - 1, total=total, visible=True
        )


def _list(console: Console, json_file: str | None) -> None:
    from outcore.machine import catalogue_names, machine_named

    machines = [machine_named(name) for name in catalogue_names()]
    console.print(catalogue_table(machines))
    write_json({"machines": [asdict(machine) for machine in machines]}, json_file)
