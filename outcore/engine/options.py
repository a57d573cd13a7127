"""What a user may choose in ``offload``, checked and turned into values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from outcore.errors import DoesNotFit
from outcore.kernels.packed_format import PackedFormat, packed_format
from outcore.machine import here
from outcore.optim.state_format import StateFormat
from outcore.optim.state_format import state_format as make_state_format
from outcore.planning.device_type import computing_on_cpu
from outcore.planning.make import plan as make_plan
from outcore.planning.plan import Budgets, Plan
from outcore.store.disk_budget import DiskBudget, parse_disk
from outcore.units import parse_budget, parse_bytes

_HOMES = ("device", "host", "disk")
_ACTIVATIONS = ("keep", "recompute", "offload")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Choice = str | Sequence[str]
"""One for all blocks, or one for each."""


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The checked arguments of ``offload``; see there for what each one means."""

    device: torch.device
    device_memory_bytes: int | None
    host_memory_bytes: int | None
    disk: DiskBudget | None
    micro_batch: int | None
    weights: str | tuple[str, ...]
    state: str | tuple[str, ...]
    edge_state: str
    activations: str | tuple[str, ...]
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    state_format: StateFormat
    frozen_weights: PackedFormat | None
    num_slots: int
    num_visits: int | None
    is_compiled: bool

    def for_blocks(self, name: str, num_blocks: int) -> tuple[str, ...]:
        """Return the option ``name`` for each block."""
        choice = getattr(self, name)
        if isinstance(choice, str):
            return (choice,) * num_blocks
        if len(choice) != num_blocks:
            raise ValueError(
                f"{name} has {len(choice)} entries, but the model has {num_blocks} blocks: give "
                "one for each, or one for all"
            )
        return tuple(choice)


PLANNED = (
    "weights",
    "state",
    "state_format",
    "frozen_weights",
    "activations",
    "micro_batch",
    "num_slots",
    "num_visits",
)
"""What a plan decides: given with one, an option must be left at its default."""


def plan_here(subject: Any, options: dict[str, Any], tokens: int, seq_len: int) -> Plan:
    """Return a plan for this machine, within the budgets of ``options`` and what is free.

    A budget of more is not refused here: the engine does that, by all that there is.
    """
    device = _device(options["device"])
    disk = None if options["disk"] is None else parse_disk(options["disk"]).path
    machine = here(disk=disk, progress=_announce_probe)
    if device.type == "cpu":
        machine = computing_on_cpu(machine, device_memory=options["device_memory"])
    try:
        return make_plan(
            subject,
            tokens=tokens,
            seq_len=seq_len,
            machine=machine,
            device_memory=_at_most(options["device_memory"], machine.device_memory_bytes),
            host_memory=_at_most(options["host_memory"], machine.host_memory_bytes),
            disk=options["disk"],
            dtype=options["dtype"],
            state_format=options["state_format"],
            frozen_weights=options["frozen_weights"],
            micro_batch=options["micro_batch"],
        )
    except DoesNotFit as error:
        if "clipping=" in str(error):  # an argument that only plans have
            error.args = (f"{error} For clipping, give plan=outcore.plan(..., clipping=...).",)
        raise


def _at_most(budget: int | str | None, free_bytes: int) -> int | str | None:
    return budget if budget is None or parse_bytes(budget) <= free_bytes else f"{free_bytes}B"


def _announce_probe(step: str, number: int, num_steps: int) -> None:
    """Say why the first call takes longer; the report is kept."""
    if number == 1:
        warnings.warn(
            "measuring this machine, once, to plan for it (under a minute); `outcore probe` does "
            "it beforehand",
            stacklevel=2,
        )


def check_budgets(options: dict[str, Any]) -> None:
    """Refuse budgets that were meant otherwise; a plan's own are taken as they are."""
    for name in ("device_memory", "host_memory"):
        if options[name] is not None:
            parse_budget(options[name], what=name)


def named_dtypes(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` with torch's types for the names that a plan has for them."""
    named = {name: options[name] for name in ("dtype", "gradient_dtype")}
    found = {n: _DTYPES.get(of, of) for n, of in named.items() if isinstance(of, str)}
    return {**options, **found}


def planned(plan: Plan, options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``offload`` that carry out ``plan``, over ``options``."""
    for name in PLANNED:
        is_plans = name == "micro_batch" and options[name] == plan.job.micro_batch
        if name in ("state_format", "frozen_weights"):
            is_plans = options[name] == getattr(plan.job, name)
        if options[name] != defaults[name] and not is_plans:
            raise ValueError(f"{name} is the plan's to decide: leave it out, or make another plan")
    budgets = plan.job.budgets
    dtype = _DTYPES[plan.job.dtype]
    if options["dtype"] not in (None, dtype):
        raise ValueError(f"the plan is for dtype {dtype}, not {options['dtype']}")
    return {
        **options,
        "dtype": dtype,
        "state_format": plan.job.state_format,
        "frozen_weights": plan.job.frozen_weights,
        "device_memory": options["device_memory"] or budgets.device_bytes,
        "host_memory": options["host_memory"] or budgets.host_bytes,
        "disk": options["disk"] or _disk_text(budgets),
        "weights": [block.weights for block in plan.blocks],
        "state": [block.state for block in plan.blocks],
        "edge_state": plan.edge_state,
        "activations": [block.activations for block in plan.blocks],
        "micro_batch": plan.micro_batch,
        "num_slots": plan.num_slots,
        "num_visits": plan.num_visits,
    }


def _disk_text(budgets: Budgets) -> str | None:
    if budgets.disk_path is None:
        return None
    size = "" if budgets.disk_bytes is None else f":{budgets.disk_bytes}B"
    return f"{budgets.disk_path}{size}"


def check_options(
    *,
    device: str | torch.device | None,
    device_memory: int | str | None,
    host_memory: int | str | None,
    disk: str | PathLike[str] | None,
    micro_batch: int | None,
    weights: Choice,
    state: Choice,
    activations: Choice,
    dtype: torch.dtype | None,
    gradient_dtype: torch.dtype | None,
    state_format: str,
    frozen_weights: str | None,
    num_slots: int,
    num_visits: int | None,
    compile: bool | None,
    edge_state: str | None = None,
) -> OffloadOptions:
    chosen = _device(device)
    weights = _choice("weights", weights, _HOMES)
    state = _choice("state", state, _HOMES)
    if activations != "auto":
        activations = _choice("activations", activations, _ACTIVATIONS, also=("auto",))
    if dtype is None:
        is_exact = chosen.type != "cuda" and state_format == "fp32"
        dtype = torch.float32 if is_exact else torch.bfloat16
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"dtype must be torch.bfloat16 (with an fp32 master) or torch.float32, not {dtype}"
        )
    gradient_dtype = gradient_dtype or dtype
    if gradient_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"gradient_dtype must be bfloat16 or float32, not {gradient_dtype}")
    for name, value, least in (
        ("micro_batch", micro_batch, 1),
        ("num_slots", num_slots, 1),
        ("num_visits", num_visits, 0),
    ):
        if value is None and name != "num_slots":
            continue
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be {least} or more, not {value!r}")
    return OffloadOptions(
        device=chosen,
        device_memory_bytes=_bytes(device_memory, "device_memory"),
        host_memory_bytes=_bytes(host_memory, "host_memory"),
        disk=_disk(disk, weights, state),
        micro_batch=micro_batch,
        weights=weights,
        state=state,
        # Edges are small, and their gradients come parameter by parameter: never on disk.
        edge_state=edge_state or ("device" if state == "device" else "host"),
        activations=activations,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        state_format=make_state_format(state_format, dtype),
        frozen_weights=packed_format(frozen_weights),
        num_slots=num_slots,
        num_visits=num_visits,
        is_compiled=chosen.type == "cuda" if compile is None else compile,
    )


def _choice(
    name: str, choice: Choice, allowed: tuple[str, ...], also: tuple[str, ...] = ()
) -> str | tuple[str, ...]:
    """Check one choice, or one for each block; ``also`` is allowed for all blocks only."""
    for value in (choice,) if isinstance(choice, str) or choice is None else tuple(choice):
        if value not in allowed:
            names = ", ".join(map(repr, (*allowed, *also)))
            raise ValueError(f"{name} must be one of {names}, not {value!r}")
    return choice if isinstance(choice, str) else tuple(choice)


def computes_on_cuda(device: str | torch.device | None) -> bool:
    return _device(device).type == "cuda"


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device must be "cuda" or "cpu", not {device!r}') from None
    if chosen.type not in ("cuda", "cpu"):
        raise ValueError(f'device must be "cuda" or "cpu", not {str(device)!r}')
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError('device="cuda", but torch sees no GPU; use device="cpu"')
        index = chosen.index if chosen.index is not None else torch.cuda.current_device()
        return torch.device("cuda", index)
    return torch.device("cpu")


def _disk(
    disk: str | PathLike[str] | None, weights: str | tuple[str, ...], state: str | tuple[str, ...]
) -> DiskBudget | None:
    if "disk" not in (weights, state) and "disk" not in (*weights, *state):
        return None
    for weight_home, state_home in _pairs(weights, state):
        if weight_home == "disk" and state_home == "device":
            raise ValueError(
                'weights="disk" with state="device" is not possible: keep the weights of a block '
                "whose state is on the device there or on the host"
            )
    if disk is None:
        raise ValueError(
            'a home on disk needs a directory for scratch files: pass disk="/mnt/nvme:500GiB"'
        )
    return parse_disk(disk)


def _pairs(
    weights: str | tuple[str, ...], state: str | tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    length = max(len(choice) if isinstance(choice, tuple) else 1 for choice in (weights, state))
    for choice in (weights, state):
        if isinstance(choice, tuple) and len(choice) != length:
            return  # refused when the number of blocks is known
    expanded = [c if isinstance(c, tuple) else (c,) * length for c in (weights, state)]
    yield from zip(*expanded, strict=True)


def _bytes(size: int | str | None, what: str) -> int | None:
    return None if size is None else parse_bytes(size, what=what)
