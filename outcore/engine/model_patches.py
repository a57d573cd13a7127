"""What is changed on the model itself: a few methods and hooks of this one instance.

Its classes and its forward stay as they are. Blocks get a forward that streams; edges wait for
their updates; the head defers its logits in training; saving and loading wait for the updaters.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outcore.blocks import end_module
from outcore.engine.adapter_merging import merging_methods
from outcore.engine.edge_gradients import send_home
from outcore.engine.home_parameter import count_writes_to_data
from outcore.engine.offloaded import Engine
from outcore.engine.outer_compilation import uncompiled_methods
from outcore.engine.packed_parameters import hook_packed_parameters
from outcore.engine.saving_and_loading import hook_saving_and_loading, saving_methods
from outcore.errors import OutcoreError
from outcore.left_to_python import left_to_python
from outcore.passes.block_function import BlockCall, run_without_graph
from outcore.passes.deferred_logits import deferred_logits
from outcore.passes.one_block_at_a_time import LockedBlockFunction
from outcore.passes.streamed_block import BlockServices, StreamedBlock
from outcore.passes.token_ranges import TokenRanges
from outcore.stream.unit import Unit


def patch_model(model: nn.Module, engine: Engine, head: nn.Linear | None) -> None:
    """Make ``model`` run through ``engine``."""
    services = BlockServices(
        device=engine.device,
        slots=engine.slots,
        expansion=engine.expansion,
        backend=engine.backend,
        policy=engine.policy,
        host_inputs=engine.host_inputs,
        device_ledger=engine.device_ledger,
        heap=engine.heap,
        micro_batch=engine.options.micro_batch,
        is_compiled=engine.options.is_compiled,
        lock=engine.block_lock,
    )
    num_blocks = 0
    for unit in engine.units:
        for parameter in unit.parameters.values():
            # Weak: the engine holds autograd's nodes of edges, and through them these parameters.
            parameter._outcore = weakref.ref(engine.backend)  # type: ignore[attr-defined]
            engine.undo_patches.append(count_writes_to_data(parameter))
        if unit.arrives_whole:
            module, position = unit.part.module, num_blocks if unit.part.is_block else None
            num_blocks += unit.part.is_block
            block = StreamedBlock(unit, module, services, position)
            replace_attribute(
                engine, module, "forward", functools.partial(_block_forward, engine, block)
            )
            if unit.part.is_block and getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
        else:
            engine.undo_patches += [
                send_home(engine, unit, field) for field in unit.layout.trainable
            ]
    _make_edges_wait(model, engine)
    if head is not None:
        _make_head_wait_after_body(model, engine, head)
        forward = functools.partial(_head_forward, engine, head, head.forward)
        replace_attribute(engine, head, "forward", forward)
    _check_tokens(model, engine, head)
    _patch_methods(model, engine)
    blocks = [unit.part.module for unit in engine.units if unit.arrives_whole]
    for module, name, method in [
        *merging_methods(model, engine),
        *saving_methods(model),
        *uncompiled_methods(model, blocks),
    ]:
        replace_attribute(engine, module, name, method)
    engine.undo_patches += hook_packed_parameters(engine.units, engine.device)


def _block_forward(engine: Engine, block: StreamedBlock, *args: Any, **kwargs: Any) -> Any:
    with engine.block_lock:
        block.structure.refuse_changes(block.unit.name)
        engine.notice_writes([block.unit])  # a forward need not begin with the whole model's call
        call = BlockCall(block, args, kwargs)
        tensors = call.take_tensors()
        if torch.is_grad_enabled() and (block.trainable_names or any(call.needs_grad)):
            return call.rebuild(LockedBlockFunction.apply(call, engine.anchor, *tensors))  # type: ignore[no-untyped-call, unused-ignore]
        return call.rebuild(run_without_graph(call, tensors))


def _head_forward(
    engine: Engine, head: nn.Linear, original: Callable[..., Tensor], hidden: Tensor
) -> Tensor:
    if not engine.forward.defers_logits or hidden.dim() < 2 or torch.compiler.is_compiling():
        return original(hidden)
    if not hasattr(head.weight, "_outcore"):  # a user has put another one there
        return original(hidden)
    unit = engine.unit_of(head.weight)
    version = unit.version
    return deferred_logits(
        hidden,
        head.weight,
        head.bias,
        is_compiled=engine.options.is_compiled,
        is_current=lambda: unit.version == version,
    )


def replace_attribute(engine: Engine, module: nn.Module, name: str, value: Any) -> None:
    """Give this one instance another attribute, over its class's."""
    before = module.__dict__.get(name)
    setattr(module, name, value)

    def undo() -> None:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)

    engine.undo_patches.append(undo)


def _make_edges_wait(model: nn.Module, engine: Engine) -> None:
    """Before a module uses resident weights of its own, wait for their updates."""
    edges = [unit for unit in engine.units if not unit.arrives_whole]
    unit_of = {id(p): unit for unit in edges for p in unit.parameters.values()}
    for module in model.modules():
        own = {
            unit_of[id(p)].index: unit_of[id(p)]
            for p in module.parameters(recurse=False)
            if id(p) in unit_of
        }
        if own:
            waits = functools.partial(_wait_for, engine, list(own.values()))
            engine.undo_patches.append(module.register_forward_pre_hook(waits).remove)


@left_to_python
def _wait_for(engine: Engine, units: Sequence[Unit], module: nn.Module, args: Any) -> None:
    with engine.block_lock:
        engine.notice_writes(units)
    for unit in units:
        engine.called_edges.add(unit.index)
        unit.before_compute()


def _make_head_wait_after_body(model: nn.Module, engine: Engine, head: nn.Linear) -> None:
    """Wait for the head's update when the model's body has run, whoever reads the head then.

    Losses that multiply by its weight themselves (TRL's) never call it. Its update is the last in
    the queue: waited for at the beginning of a forward, it would hide nothing of the others.
    """
    units = {engine.unit_of(p).index: engine.unit_of(p) for p in head.parameters()}
    waits = functools.partial(_wait_for, engine, list(units.values()))
    for module in model.modules():
        body = module.base_model if hasattr(type(module), "base_model_prefix") else module
        if isinstance(body, nn.Module) and body is not module and not _holds(body, head):
            hook = body.register_forward_hook(lambda body, args, _: waits(body, args))
            engine.undo_patches.append(hook.remove)


def _holds(module: nn.Module, wanted: nn.Module) -> bool:
    return any(inner is wanted for inner in module.modules())


def _wait_for_uncalled(engine: Engine) -> None:
    """Wait here for edges that no call of a module of theirs has announced in earlier forwards.

    A parent reads such weights directly (DeBERTa's relative positions). The first forward, before
    any update, has shown which they are.
    """
    for unit in engine.units:
        if not unit.arrives_whole and unit.index not in engine.called_edges:
            unit.before_compute()


def _check_tokens(model: nn.Module, engine: Engine, head: nn.Linear | None) -> None:
    """Say which tokens there are, and let the embedding look at its own where some are suspect."""
    embedding = end_module(model, "input")
    if not isinstance(embedding, nn.Embedding):
        embedding = None
    engine.token_ranges = TokenRanges(
        embedding=None if embedding is None else embedding.weight.shape[0],
        head=None if head is None else head.out_features,
    )
    if embedding is not None:
        hook = embedding.register_forward_pre_hook(functools.partial(_check_ids, engine))
        engine.undo_patches.append(hook.remove)


@left_to_python
def _check_ids(engine: Engine, module: nn.Module, args: tuple[Any, ...]) -> None:
    if engine.forward.suspects_ids and args:
        engine.token_ranges.check_ids(args[0])


def _patch_methods(model: nn.Module, engine: Engine) -> None:
    caching = [m for m in model.modules() if _takes_use_cache(m)]  # inner ones are called too
    before = functools.partial(_before_forward, engine)
    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        *(
            m.register_forward_pre_hook(
                functools.partial(_without_cache, list(inspect.signature(m.forward).parameters)),
                with_kwargs=True,
            )
            for m in caching
        ),
    ]
    engine.undo_patches += [hook.remove for hook in hooks]
    engine.undo_patches += hook_saving_and_loading(model, engine)
    replacements: dict[str, Any] = {
        "_outcore_engine": engine,
        "zero_grad": left_to_python(functools.partial(_zero_grad, engine, model.zero_grad)),
        "to": functools.partial(_to, model, engine),
    }
    if hasattr(model, "resize_token_embeddings"):
        replacements["resize_token_embeddings"] = _refuse_resize
    for name, value in replacements.items():
        replace_attribute(engine, model, name, value)
    for module in model.modules():
        replace_attribute(engine, module, "_apply", functools.partial(_apply_nothing, module))
        if hasattr(type(module), "gradient_checkpointing_enable"):
            replace_attribute(
                engine, module, "gradient_checkpointing_enable", _keep_own_recomputing
            )


def unpatch_model(engine: Engine) -> None:
    """Give the model its own methods back, last change first."""
    while engine.undo_patches:
        engine.undo_patches.pop()()
    for unit in engine.units:
        for parameter in unit.parameters.values():
            del parameter._outcore  # type: ignore[attr-defined]


def _before_forward(
    engine: Engine, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with engine.block_lock:
        engine.policy.plan()
        engine.host_inputs.forget()
        engine.notice_writes()
    _wait_for_uncalled(engine)
    labels = kwargs.get("labels")
    wanted = torch.is_grad_enabled() or labels is not None
    engine.forward.defers_logits = wanted or engine.always_defers_logits
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.device != engine.device:
            raise ValueError(
                f"an input is on {value.device}, the model computes on {engine.device}: move the "
                f'batch with .to("{engine.device}")'
            )
    engine.forward.suspects_ids = engine.token_ranges.check(
        _tokens(*args[:1], kwargs.get("input_ids"), kwargs.get("decoder_input_ids")),
        next(iter(_tokens(labels)), None),
        kwargs.get("ignore_index", -100),
    )


def _tokens(*values: Any) -> list[Tensor]:
    """Return those of the values that can be token ids: of types that an embedding takes."""
    types = (torch.int64, torch.int32)
    return [value for value in values if isinstance(value, Tensor) and value.dtype in types]


def _takes_use_cache(module: nn.Module) -> bool:
    return hasattr(module, "config") and "use_cache" in inspect.signature(module.forward).parameters


def _without_cache(
    names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """In training no block may fill a cache: micro-batches and recomputes would fill it twice.

    names: of what the forward takes, in order. Some models hand on ``use_cache`` by its position.
    """
    if not torch.is_grad_enabled():
        return None
    by_position = dict(zip(names, args, strict=False))
    given = {**by_position, **kwargs}
    if given.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values cannot be used while gradients are enabled (prefix tuning trains "
            "them: use another of PEFT's methods, such as LoRA)"
        )
    if given.get("use_cache"):
        warnings.warn("use_cache=True is ignored while gradients are enabled", stacklevel=2)
    if "use_cache" in by_position:
        position = names.index("use_cache")
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


def _zero_grad(engine: Engine, original: Callable[[bool], None], set_to_none: bool = True) -> None:
    original(set_to_none)
    engine.backend.clear_gradients()


def _to(model: nn.Module, engine: Engine, *args: Any, **kwargs: Any) -> nn.Module:
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if dtype in (None, engine.options.dtype) and (
        device is None
        or (device.type == engine.device.type and device.index in (None, engine.device.index))
    ):
        return model
    raise OutcoreError(
        f"an offloaded model stays where it was planned (computing on {engine.device} in "
        f"{engine.options.dtype}): offload it anew for another device or type"
    )


def _apply_nothing(module: nn.Module, function: Callable[[Tensor], Tensor], *_: Any) -> nn.Module:
    """Let ``to``, ``float`` and the like pass where they change nothing; refuse them elsewhere.

    Some routers call ``to`` on a layer of theirs in every forward.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not _leaves_as_is(function, tensor):
            raise OutcoreError(
                "an offloaded model cannot be moved or cast: call outcore.release(model) first, or "
                "offload it anew for another device or type. Where the model itself casts, for a "
                "router say, its config names the type (router_dtype)"
            )
    return module


def _leaves_as_is(function: Callable[[Tensor], Tensor], tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():  # there every result is another tensor
        result = function(tensor)
        return result.dtype == tensor.dtype and result.device == tensor.device
    empty = torch.empty(0)
    function(empty)
    if empty.is_shared():
        return False  # share_memory(): the tensor stays, its memory does not
    try:
        return function(tensor) is tensor
    except NotImplementedError:  # a packed weight has no values that could move
        return False


def _keep_own_recomputing(*_: Any, **__: Any) -> None:
    """Do nothing: blocks keep or recompute by their own plan, and would recompute twice."""


def _refuse_resize(*_: Any, **__: Any) -> nn.Module:
    raise OutcoreError(
        "the embedding of an offloaded model cannot be resized: resize before outcore.offload, or "
        "call outcore.release(model) first"
    )
