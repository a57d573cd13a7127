"""``outcore.plan``: a plan in one call, for a model by name or at hand, on a machine by name."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from outcore.kernels.packed_format import packed_format
from outcore.machine import machine_named
from outcore.machine.machine import Machine
from outcore.model_spec import ModelSpec, model_spec, spec_of_model
from outcore.optim.state_format import state_format as check_state_format
from outcore.planning.device_type import computing_on_cpu, default_dtype, device_type
from outcore.planning.plan import Budgets, Clipping, FrozenWeights, Job, Plan, StateFormat
from outcore.planning.search import make_plan
from outcore.planning.step_size import check_step_size
from outcore.planning.within_machine import (
    budgets_within,
    check_micro_batch,
    with_asked_memory,
)
from outcore.store.disk_budget import parse_disk
from outcore.store.packed_spans import MIN_ELEMENTS
from outcore.units import parse_budget

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TORCH_TYPES: dict[Literal["bf16", "fp32"], torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def plan(
    model: str | Path | PretrainedConfig | Mapping[str, Any] | nn.Module,
    *,
    tokens: int,
    seq_len: int,
    machine: str | Machine = "here",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | PathLike[str] | None = None,
    clipping: bool | Literal["two-pass"] = True,
    dtype: Literal["bf16", "fp32"] | torch.dtype | None = None,
    state_format: StateFormat = "fp32",
    adapters: Any = None,
    frozen_weights: FrozenWeights | None = None,
    micro_batch: int | None = None,
    objective: Literal["speed", "memory"] = "speed",
    masked: bool = False,
    checkpoints: bool = False,
) -> Plan:
    """Return where everything would live, and what a step of ``tokens`` would cost.

    model: a Hugging Face directory, an id of the Hub, a config, the name of a shape, or a model
        (frozen parameters are then seen). No weights are read or fetched.
    machine: "here" measures this one (once), a name is looked up in the catalogue.
    device_memory, host_memory: budgets such as "24GiB"; None for what is free. What is far more
        than the machine has is refused; one of the catalogue may have more host memory than usual.
    disk: "/mnt/nvme:500GiB" lets weights and state go there; None: no disk. With "here", that is
        the disk whose speed counts.
    clipping: True lets gradients wait for the norm of all; False is for
        ``AdamW(update_during_backward=True)``, "two-pass" for the same with ``max_grad_norm``.
    masked: True where sequences hold several documents, or padding: Transformers then makes a mask
        of seq_len by seq_len for each, and attention works with it.
    checkpoints: True counts host memory for a copy of all state, so that a checkpoint is written
        while training goes on. Where there is none, or steps would be more than 5% slower for it,
        checkpoints are synchronous (``Plan.stages_checkpoints``).
    dtype: None for bf16, or fp32 where the device is a CPU and ``state_format`` allows it.

    adapters: a ``peft.LoraConfig`` for a model that is not at hand yet; its base is then frozen.
    frozen_weights: "int8" or "int4" for the frozen matrices of blocks; None leaves them alone.

    Raises DoesNotFit, with what is missing and what would fit, before anything is allocated.
    """
    check_step_size(tokens, seq_len)
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
        raise ValueError(f"micro_batch must be 1 or more, not {micro_batch!r}")
    check_micro_batch(micro_batch, tokens // seq_len)
    budget = None if disk is None else parse_disk(disk)
    budgets = Budgets(
        device_bytes=_bytes(device_memory, "device_memory"),
        host_bytes=_bytes(host_memory, "host_memory"),
        disk_bytes=0 if budget is None else budget.num_bytes,
        disk_path=None if budget is None else str(budget.path),
    )
    packed_format(frozen_weights)  # refuses other names
    check_state_format(state_format, torch.bfloat16)  # its name, before anything is measured
    if objective not in ("speed", "memory"):
        raise ValueError(f'objective must be "speed" or "memory", not {objective!r}')
    if isinstance(model, nn.Module):
        if adapters is not None:
            raise ValueError("a model at hand has its adapters: leave adapters out")
        spec = spec_of_model(model)
    else:
        spec = model_spec(model, adapters=adapters)
    _check_something_is_frozen(spec, frozen_weights)
    is_named = isinstance(machine, str)
    if isinstance(machine, str):
        machine = machine_named(machine, disk=None if budget is None else budget.path)
    if not isinstance(machine, Machine):
        raise ValueError(f"machine must be a name such as 'here', or a Machine, not {machine!r}")
    machine = with_asked_memory(machine, budgets)
    budgets = budgets_within(budgets, machine)
    if is_named and device_type(machine) == "cpu":
        machine = computing_on_cpu(machine, device_memory=budgets.device_bytes)
    if budget is not None and not machine.disk_read_bytes_s:  # a plan would put nothing there
        raise ValueError(
            f"disk {budget.path} is memory, or {machine.name} has no disk: name a directory on one"
        )
    number = _dtype(dtype, machine, state_format)
    check_state_format(state_format, _TORCH_TYPES[number])
    job = Job(
        tokens=tokens,
        seq_len=seq_len,
        clipping=_clipping(clipping),
        dtype=number,
        state_format=state_format,
        frozen_weights=frozen_weights,
        micro_batch=micro_batch,
        budgets=budgets,
        objective=objective,
        is_masked=masked,
        checkpoints=checkpoints,
    )
    return make_plan(spec, machine, job)


def _clipping(asked: bool | str) -> Clipping:
    if asked is True:
        return "waiting"
    if asked is False:
        return "none"
    if asked == "two-pass":
        return "two-pass"
    raise ValueError(f'clipping must be True, False or "two-pass", not {asked!r}')


def _check_something_is_frozen(spec: ModelSpec, frozen_weights: str | None) -> None:
    """Refuse frozen_weights for a model that is trained whole."""
    if frozen_weights is not None and not any(b.frozen_matrices for b in spec.blocks):
        raise ValueError(
            f'frozen_weights="{frozen_weights}", but no block has a frozen matrix of '
            f"{MIN_ELEMENTS:,} elements or more: give adapters, or a model whose base is frozen"
        )


def _dtype(
    dtype: str | torch.dtype | None, machine: Machine, state_format: str
) -> Literal["bf16", "fp32"]:
    if dtype is None:
        return default_dtype(machine, state_format)
    for name, number in _TORCH_TYPES.items():
        if dtype in (name, number):
            return name
    raise ValueError(f'dtype must be "bf16" or "fp32", or torch\'s name of it, not {dtype!r}')


def _bytes(size: int | str | None, what: str) -> int | None:
    return None if size is None else parse_budget(size, what=what)
