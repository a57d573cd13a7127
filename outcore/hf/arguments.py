"""What TrainingArguments mean for an offloaded model: how it is offloaded, and its AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from outcore.optim.adamw import AdamW

_ADAMW_NAMES = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused")


def check_arguments(args: Any) -> None:
    """Refuse what cannot be done with a model that streams; ValueError names what to do instead."""
    refusals = (
        (args.world_size > 1, f"{args.world_size} processes", "one process with one GPU"),
        (bool(args.deepspeed), "deepspeed", "no deepspeed: Outcore does the offloading"),
        (bool(args.fsdp), "fsdp", "no fsdp: Outcore does the offloading"),
        (args.fp16, "fp16", "bf16=True, which needs no loss scaling"),
        (args.fp16_full_eval, "fp16_full_eval", "the type of training"),
        (
            args.use_liger_kernel,
            "use_liger_kernel",
            "the chunked loss that offloading brings, which needs no logits either",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size",
            "a batch size that outcore.plan finds to fit",
        ),
        (
            args.torch_compile_backend not in (None, "inductor"),
            f"torch_compile_backend={args.torch_compile_backend!r}",
            'the one of its blocks, "inductor"',
        ),
        (
            args.torch_compile_mode not in (None, "default"),
            f"torch_compile_mode={args.torch_compile_mode!r}",
            "the mode of its blocks, the default one",
        ),
        (
            getattr(args, "sync_ref_model", False),
            "sync_ref_model",
            "a reference model that stays as it is",
        ),
        (
            str(getattr(args.optim, "value", args.optim)) not in _ADAMW_NAMES,
            f"optim={str(getattr(args.optim, 'value', args.optim))!r}",
            'optim="adamw_torch"; for 8-bit state pass offload={"state_format": "compact"}',
        ),
    )
    for is_refused, what, remedy in refusals:
        if is_refused:
            raise ValueError(f"{what} does not work with an offloaded model: use {remedy}")


def offload_options(args: Any, model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``outcore.offload``: those given, and what the arguments imply."""
    options = {"device": args.device, **given}
    chosen = torch.device(options["device"])
    if chosen.type != args.device.type or chosen.index not in (None, args.device.index):
        raise ValueError(
            f"offload has device={str(options['device'])!r}, but the TrainingArguments compute on "
            f'"{args.device}": leave device out, and choose it there (use_cpu=True)'
        )
    if options.get("dtype") is None and options.get("plan") is None:
        options["dtype"] = _dtype(args, model)
    if options.get("dtype") is not None:
        check_types(args, options["dtype"])
    if args.torch_compile:
        options.setdefault("compile", True)
    return options


def check_types(args: Any, dtype: torch.dtype) -> None:
    """Refuse to train or evaluate in another type than the model's, which is ``dtype``."""
    if dtype == torch.bfloat16:
        return
    if args.bf16_full_eval:
        raise ValueError(
            "bf16_full_eval does not work with an offloaded model that computes in fp32: use "
            "bf16=True, or leave it out"
        )
    if args.bf16:
        raise ValueError(
            "the TrainingArguments have bf16=True, the model is offloaded to compute in fp32: "
            'offload it with dtype="bf16", or pass bf16=False'
        )


def _dtype(args: Any, model: nn.Module) -> torch.dtype:
    """Return bf16 where it is asked for or where the model is in it; its master is fp32."""
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    # PEFT keeps adapters in fp32 over a bf16 base: the base, which is most of the model, decides.
    of_model = getattr(model, "dtype", first)
    return torch.bfloat16 if args.bf16 or of_model == torch.bfloat16 else torch.float32


def clip_norm(args: Any) -> float | None:
    """Return the norm that gradients are clipped to, None for no clipping."""
    return args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None


def adamw_options(args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``outcore.AdamW``: those given, and what the arguments imply."""
    if "weight_decay" in given:
        raise ValueError(
            "adamw= has weight_decay, which the Trainer gives to its groups of parameters: set it "
            "in the TrainingArguments"
        )
    options = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        # Gradients leave the device during the backward, so the optimizer itself clips them.
        "max_grad_norm": clip_norm(args),
        "rounding_seed": args.seed,
        **given,
    }
    _check_one_pass(options.get("update_during_backward", False), options["max_grad_norm"])
    return options


def check_optimizer(args: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a given optimizer that would not do what the arguments say."""
    if not isinstance(optimizer, AdamW):
        raise ValueError(
            f"{type(optimizer).__name__} would see no gradients, which leave the device during "
            "the backward: pass an outcore.AdamW in optimizers=, or none"
        )
    if optimizer.max_grad_norm != clip_norm(args):
        raise ValueError(
            f"the TrainingArguments have max_grad_norm={args.max_grad_norm}, the AdamW has "
            f"{optimizer.max_grad_norm}: it does the clipping, so give both the same (0 in the one "
            "is None in the other)"
        )
    _check_one_pass(optimizer.update_during_backward, optimizer.max_grad_norm)


def _check_one_pass(updates_during_backward: bool, max_grad_norm: float | None) -> None:
    if updates_during_backward and max_grad_norm is not None:
        raise ValueError(
            "update_during_backward with clipping takes two passes over each batch, which a "
            "Trainer does not make: set max_grad_norm=0, or leave update_during_backward off"
        )
