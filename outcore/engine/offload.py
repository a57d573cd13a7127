"""``offload``: from an ordinary model to one whose memory is planned and streamed.

The path reads: check the options, find the units, open the books, place the weights, start the
streams, patch the model.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from outcore.engine.device_limit import DeviceLimit
from outcore.engine.disk_tier import DiskTier
from outcore.engine.given_plan import check_plan_is_for, given_plan
from outcore.engine.homes import is_left_open, usual_homes, without_plan
from outcore.engine.model_patches import patch_model, unpatch_model
from outcore.engine.offloaded import Engine
from outcore.engine.options import (
    Choice,
    OffloadOptions,
    check_budgets,
    check_options,
    computes_on_cuda,
    named_dtypes,
    plan_here,
    planned,
)
from outcore.engine.packed_parameters import check_room_to_expand, expand_parameters
from outcore.engine.placement import (
    Source,
    build_units,
    move_buffers,
    output_head,
    place_units,
    retie,
)
from outcore.errors import OutcoreError
from outcore.passes.compilation import start_compiler
from outcore.planning.memory import DEVICE_SHARE, HOST_SHARE
from outcore.planning.plan import Plan
from outcore.store.heap import Heap
from outcore.store.ledger import Ledger
from outcore.store.memory_limits import anonymous_bytes, available_host_bytes
from outcore.stream.expansion import Expansion
from outcore.stream.lanes import Lane
from outcore.stream.slots import Slots
from outcore.units import format_bytes

Model = TypeVar("Model", bound=nn.Module)

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # that are still in memory


def offload(
    model: Model,
    *,
    plan: Plan | str | PathLike[str] | None = None,
    tokens: int | None = None,
    seq_len: int | None = None,
    device: str | torch.device | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | PathLike[str] | None = None,
    micro_batch: int | None = None,
    weights: Choice | None = None,
    state: Choice | None = None,
    activations: Choice | None = None,
    dtype: torch.dtype | str | None = None,
    gradient_dtype: torch.dtype | str | None = None,
    state_format: str = "fp32",
    frozen_weights: str | None = None,
    num_slots: int = 3,
    num_visits: int | None = None,
    compile: bool | None = None,
) -> Model:
    """Give the model's weights, gradients and optimizer state homes off the device, in place.

    plan: what outcore.plan made, or the file that `outcore plan --json` wrote; it decides homes,
        activations, micro-batch, slots and visits.
    tokens, seq_len: of a step; with both, a plan for this machine is made here, with clipping.
        Without a plan and without homes, a GPU gets the homes of a plan for a usual batch, and
        activations and lodged state adapt to what the first step leaves free.
    device: where the model computes; "cpu" is a device like any other. Default: a GPU if any.
    device_memory, host_memory: budgets such as "24GiB"; what exceeds them is refused.
    disk: a directory for scratch files, with a size if wanted: "/mnt/nvme:500GiB".
    micro_batch: sequences that a block works on at a time; None picks a size.
    weights, state: "host", "device" or "disk", the home of block weights and optimizer state.
    activations: "keep", "recompute", "offload" (recompute, and the block's input waits on the
        host), or "auto": keep as many blocks as the device budget allows.
        Each of these three also takes a list with one entry for each block. Once one of them is
        given, the others default to "host", "host" and "auto".
    dtype: bfloat16 computes in bf16 with an fp32 master; float32 is fp32 throughout; "bf16"
        and "fp32" name them too. None: bfloat16 on a GPU and where the state is compact or
        minimal, float32 on the CPU otherwise.
    gradient_dtype: the type in which gradients leave the device; None: the same as dtype.
    state_format: "fp32" is exact, 12 bytes a parameter with its bf16 weight; "compact" (8-bit
        moments, 24-bit master) takes 5, "minimal" (8-bit moments, bf16 weights) 4; both round
        stochastically and need dtype=torch.bfloat16.
    frozen_weights: "int8" or "int4" keeps the frozen matrices of blocks (a base under LoRA
        adapters) in that form in their homes, and expands them on the device; this changes numbers
        (docs/quantized-base.md). None leaves every weight as it is.
    num_slots: device buffers that streamed weights pass through.
    num_visits: device buffers for optimizer state that is updated on the device; None: as fits.
    compile: torch.compile the blocks and the loss; None: on a GPU.

    Returns the same model. Edges (embedding, final norm, head) stay on the device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"offload takes a model, not {model!r}: load one with from_pretrained, or use "
            "outcore.load(directory)"
        )
    options, found_plan = resolve_options(
        model,
        plan=plan,
        tokens=tokens,
        seq_len=seq_len,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        micro_batch=micro_batch,
        weights=weights,
        state=state,
        activations=activations,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        state_format=state_format,
        frozen_weights=frozen_weights,
        num_slots=num_slots,
        num_visits=num_visits,
        compile=compile,
    )
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ValueError(
            f"{meta[0]} and {len(meta) - 1} more parameters are on the meta device and have no "
            "values: use outcore.load(directory) or outcore.from_config(config)"
        )
    return offload_from(model, options, source=None, plan=found_plan)


def resolve_options(
    subject: Any,
    *,
    plan: Plan | str | PathLike[str] | None = None,
    tokens: int | None = None,
    seq_len: int | None = None,
    **given: Any,
) -> tuple[OffloadOptions, Plan | None]:
    """Check the arguments of ``offload``, of which some may be missing, and a plan's.

    ``subject``: a model, config or directory, to make a plan for if none is given.
    """
    defaults = {**(offload.__kwdefaults__ or {})}
    for name in ("plan", "tokens", "seq_len"):
        defaults.pop(name)
    unknown = set(given) - set(defaults)
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    options = named_dtypes({**defaults, **given})
    check_budgets(options)
    chosen = given_plan(plan)
    if (tokens is None) != (seq_len is None):
        raise ValueError("tokens and seq_len belong together: a plan needs both")
    if tokens is not None and seq_len is not None:
        if chosen is not None:
            raise ValueError("give a plan, or tokens and seq_len to make one, not both")
        chosen = plan_here(subject, options, tokens, seq_len)
    if chosen is not None:
        options = planned(chosen, options, defaults)
    elif is_left_open(options) and computes_on_cuda(options["device"]) and _has_config(subject):
        options = usual_homes(
            options, lambda tokens, seq_len: _usual_plan(subject, options, tokens, seq_len)
        )
    else:
        options = without_plan(options)
    return check_options(**options), chosen


def _usual_plan(subject: Any, options: dict[str, Any], tokens: int, seq_len: int) -> Plan:
    """Return the plan of a usual batch; the one to come may have more sequences at a time."""
    micro_batch = options["micro_batch"]
    if type(micro_batch) is int:
        options = {**options, "micro_batch": min(micro_batch, tokens // seq_len)}
    return plan_here(subject, options, tokens, seq_len)


def _has_config(subject: Any) -> bool:
    """Whether a plan can be made: of a bare module only its blocks are known."""
    return not isinstance(subject, nn.Module) or hasattr(subject, "config")


def offload_from(
    model: Model, options: OffloadOptions, *, source: Source | None, plan: Plan | None
) -> Model:
    """Offload ``model``; ``source`` gives the values of parameters that are on meta."""
    if any(hasattr(parameter, "_outcore") for parameter in model.parameters()):
        raise OutcoreError(
            "this model is offloaded already; call outcore.release(model) before another offload"
        )
    if plan is not None:
        check_plan_is_for(plan, model)
    units = build_units(model, options)
    host_ledger, device_ledger, device_limit = _open_books(options)
    copy_in: Lane | None = None
    disk: DiskTier | None = None
    try:
        heap = Heap(_process_limit(options, host_ledger.within))
        if options.is_compiled:
            start_compiler()
        copy_in = Lane("copy-in", options.device, hardware="to device")
        if options.disk is not None:
            disk = DiskTier(options.disk, host_ledger=host_ledger, device=options.device)
        streamed = [u for u in units if u.weights_home != "device"]
        slots = Slots(
            streamed,
            num_slots=options.num_slots,
            device=options.device,
            dtype=options.dtype,
            copy_in=copy_in,
            ledger=device_ledger,
        )
        expansion = Expansion(
            units, device=options.device, dtype=options.dtype, ledger=device_ledger
        )
        head = output_head(model)
        replaced = place_units(
            units,
            options,
            host_ledger=host_ledger,
            device_ledger=device_ledger,
            source=source,
            make_disk=disk.make if disk is not None else None,
        )
        retie(model, replaced)
        move_buffers(model, options.device)  # these are in no books: the device may refuse them
        engine = Engine(
            units,
            options,
            host_ledger=host_ledger,
            device_ledger=device_ledger,
            device_limit=device_limit,
            heap=heap,
            slots=slots,
            expansion=expansion,
            copy_in=copy_in,
            disk=disk,
            plan=plan,
        )
    except BaseException:
        if copy_in is not None:
            copy_in.close()
        if disk is not None:
            disk.close()
        if device_limit is not None:
            device_limit.lift()
        raise
    _engines.add(engine)
    patch_model(model, engine, head)
    return model


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of an offloaded model."""
    engine = getattr(model, "_outcore_engine", None)
    if not isinstance(engine, Engine):
        raise ValueError("the model is not offloaded: call outcore.offload(model) first")
    return engine


def is_offloaded(model: object) -> bool:
    """Whether ``model`` itself is: not one that wraps an offloaded model, as PEFT's do."""
    return "_outcore_engine" in getattr(model, "__dict__", {})


def synchronize(model: nn.Module) -> None:
    """Wait until every queued update is done, so that parameters can be read directly.

    Raises what an update failed with, and what is still wrong with weights that a forward or a
    backward could not read from disk.
    """
    engine = engine_of(model)
    engine.synchronize()
    engine.check_failed_weights()


def release(model: nn.Module) -> None:
    """Make an offloaded model an ordinary one again, end its threads and free its state.

    Parameters keep their values and stay where they are (block weights in host memory): move the
    model with ``.to(device)`` to use it, or offload it anew. Frozen weights in 8 or 4 bit are
    expanded beside them, if there is room.
    """
    engine = engine_of(model)
    check_room_to_expand(engine.units, engine.host_ledger)
    try:
        engine.synchronize()
        engine.check_weights_on_disk(engine.units)
    finally:  # a failed update is told, and holds on to nothing
        unpatch_model(engine)
        retie(model, expand_parameters(engine.units))
        engine.close()
        del engine
        gc.collect()


def _open_books(options: OffloadOptions) -> tuple[Ledger, Ledger, DeviceLimit | None]:
    if _engines:
        gc.collect()  # an offloaded model that was dropped is part of cycles, and may be large
    available = available_host_bytes()
    host_budget = options.host_memory_bytes
    if host_budget is not None and available is not None and host_budget > available:
        raise ValueError(
            f"host_memory is {format_bytes(host_budget)}, but only {format_bytes(available)} are "
            "available to this process; leave host_memory out to use what is free"
        )
    if host_budget is None and available is not None:
        host_budget = int(available * HOST_SHARE)
    device_budget = options.device_memory_bytes
    if options.device.type == "cuda":
        torch.cuda.empty_cache()  # what a released model has left to the allocator is free
        free, total = torch.cuda.mem_get_info(options.device)
        limit = device_budget
        if device_budget is not None and device_budget > total:
            raise ValueError(
                f"device_memory is {format_bytes(device_budget)}, but the GPU has "
                f"{format_bytes(total)}"
            )
        if device_budget is None:
            device_budget = int(free * DEVICE_SHARE)
            # The limit counts what the process holds already, for another model say; free does not.
            limit = device_budget + torch.cuda.memory_reserved(options.device)
        assert limit is not None
        _use_expandable_segments()
        device_limit = DeviceLimit(options.device, limit / total)
        return Ledger("host", host_budget), Ledger("device", device_budget), device_limit
    # The device of a CPU is a part of the same memory.
    memory = Ledger("machine", None if available is None else int(available * HOST_SHARE))
    return (
        Ledger("host", host_budget, within=memory),
        Ledger("device", device_budget, within=memory),
        None,
    )


def _process_limit(options: OffloadOptions, memory: Ledger | None) -> int | None:
    """Return what the process may grow to; None where its tensors are not in one ``memory``."""
    if memory is None:
        return None
    most, host = memory.budget_bytes, options.host_memory_bytes
    if host is not None:  # it covers all of the memory, or with a device's budget the rest of it
        budget = host + (options.device_memory_bytes or 0)
        most = budget if most is None else min(most, budget)
    return None if most is None else anonymous_bytes() + most


def _use_expandable_segments() -> None:
    """Let the allocator grow its segments: fragments would otherwise count against the budget."""
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return  # the user has decided
    setting = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch.cuda.memory, "_set_allocator_settings", None
    )
    if setting is not None:
        with contextlib.suppress(RuntimeError):
            setting("expandable_segments:True")
