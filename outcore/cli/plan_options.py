"""What `outcore plan` was asked for, checked: each mistake is one line that names its option."""

from __future__ import annotations

import math
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Any

import typer

from outcore.machine.machine import Machine
from outcore.planning.plan import Budgets, Job
from outcore.planning.step_size import MOST_TOKENS, too_many
from outcore.planning.within_machine import TooMuch, budgets_within, check_micro_batch
from outcore.units import format_bytes, parse_budget

HERE = "here"
_MOST_TRAIN_TOKENS = 1e18  # thousands of times what any model was trained on


def check_compare(
    compare: bool, train_tokens: float | None, price: float | None, gpus: int | None
) -> None:
    """Refuse options of the comparison that are missing, impossible, or given without it."""
    if compare and train_tokens is None:
        raise typer.BadParameter("--compare needs --train-tokens, such as 1e9")
    if train_tokens is not None and not 0 < train_tokens <= _MOST_TRAIN_TOKENS:
        raise typer.BadParameter(
            f"{train_tokens:g} is no number of tokens; write for example 1e9",
            param_hint="--train-tokens",
        )
    if price is not None and not math.isfinite(price):
        raise typer.BadParameter(f"{price} is no price", param_hint="--price-per-hour")
    given = {"--train-tokens": train_tokens, "--price-per-hour": price, "--gpus": gpus}
    for option, value in given.items():
        if value is not None and not compare:
            raise typer.BadParameter("only with --compare", param_hint=option)


def make_job(**fields: Any) -> Job:
    """Return the job, with whole sequences in the step and no more of them at a time."""
    tokens, seq_len, micro_batch = fields["tokens"], fields["seq_len"], fields["micro_batch"]
    for option, value in (("--seq-len", seq_len), ("--tokens", tokens)):
        if value > MOST_TOKENS:
            raise typer.BadParameter(f"{value:,}, {too_many()}", param_hint=option)
    if tokens % seq_len:
        below = tokens // seq_len * seq_len
        nearest = f"{below:,} or {below + seq_len:,}" if below else f"{seq_len:,}"
        raise typer.BadParameter(
            f"{tokens:,} is no multiple of --seq-len {seq_len:,}; {nearest} would be",
            param_hint="--tokens",
        )
    try:
        check_micro_batch(micro_batch, tokens // seq_len)
    except TooMuch as error:
        raise _refused(error) from None
    return Job(**fields)


def budgets(device: str | None, host: str | None, disk: str | None, machine: str) -> Budgets:
    """Return the budgets in bytes; the disk's path must exist if it is on this machine."""
    disk_path: str | None = None
    disk_bytes: int | None = 0  # no disk unless it is named
    if disk is not None:
        disk_path, colon, size = disk.rpartition(":")
        if not colon or not disk_path:
            raise typer.BadParameter(
                f"{disk!r} is not PATH:SIZE; write for example /scratch:500GiB", param_hint="--disk"
            )
        disk_path = expanduser(disk_path)  # of --disk=~/scratch, which shells leave alone
        if machine == HERE and not Path(disk_path).is_dir():
            raise typer.BadParameter(f"{disk_path} is no directory", param_hint="--disk")
        disk_bytes = _size(size, "--disk")
    return Budgets(
        device_bytes=_size(device, "--device-memory"),
        host_bytes=_size(host, "--host-memory"),
        disk_bytes=disk_bytes,
        disk_path=disk_path,
    )


def within_machine(job: Job, machine: Machine) -> Job:
    """Return the job with no more memory than the machine has; refuse what is far more."""
    try:
        within = budgets_within(job.budgets, machine)
    except TooMuch as error:
        raise _refused(error) from None
    disk_bytes = job.budgets.disk_bytes
    if machine.name == HERE and disk_bytes:
        if not machine.disk_read_bytes_s:
            raise typer.BadParameter(
                f"{job.budgets.disk_path} is memory, not a disk", param_hint="--disk"
            )
        if disk_bytes > machine.disk_bytes:
            raise typer.BadParameter(
                f"{format_bytes(disk_bytes)}, but {format_bytes(machine.disk_bytes)} are free at "
                f"{job.budgets.disk_path}",
                param_hint="--disk",
            )
    return replace(job, budgets=within)


def _refused(error: TooMuch) -> typer.BadParameter:
    return typer.BadParameter(error.why, param_hint=f"--{error.argument.replace('_', '-')}")


def _size(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_budget(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
