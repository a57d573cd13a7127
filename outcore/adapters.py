"""LoRA adapters for a model that has no values yet: PEFT adds them while it is on the meta device.

PEFT puts adapters on the device of the layer that they belong to; on meta their initial values
would be lost. So each parameter is stood in for by one number that pretends to be a matrix, while
PEFT works. The adapters come out whole, drawn from torch's generator of the host.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

# Other ways to start an adapter look at the weights, which are not there.
_BLIND_STARTS = (True, False, "gaussian", "orthogonal")
_IN_MEMORY = (
    "make the model in memory, give it the adapters with peft.get_peft_model, and call "
    "outcore.offload"
)


def with_adapters(base: nn.Module, adapters: Any) -> nn.Module:
    """Return ``base``, which may be on meta, with the adapters of a ``peft.LoraConfig``."""
    _peft_for(adapters)  # before anything of them is looked at
    stand_ins: dict[int, nn.Parameter] = {}
    meta = {id(p): p for p in base.parameters() if p.is_meta}
    if meta:
        _check_blind(adapters)
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in stand_ins:
                    stand_ins[id(parameter)] = _stand_in(parameter)
                module._parameters[name] = stand_ins[id(parameter)]
    back = {id(stand_in): meta[key] for key, stand_in in stand_ins.items()}
    try:
        model = adapted(base, adapters)
    finally:
        for module in base.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in back:
                    original = back[id(parameter)]
                    original.requires_grad_(parameter.requires_grad)
                    module._parameters[name] = original
    return model


def with_adapters_on_meta(base: nn.Module, adapters: Any) -> nn.Module:
    """Return ``base``, which is on meta, with adapters that have no values either.

    For a plan: those of a model with many experts are gigabytes.
    """
    _peft_for(adapters)
    _check_blind(adapters)
    return adapted(base, adapters, low_cpu_mem_usage=True)


def adapted(base: nn.Module, adapters: Any, **options: Any) -> nn.Module:
    """Return what ``peft.get_peft_model`` does, without what it says of patterns of its own.

    It adds them for experts that are one tensor, looks for them among modules alone, and says that
    they were ignored, which they are not.
    """
    peft = _peft_for(adapters)
    with warnings.catch_warnings():
        if not (adapters.rank_pattern or adapters.alpha_pattern):
            of_patterns = "The following (rank|alpha)_pattern keys did not match"
            warnings.filterwarnings("ignore", of_patterns, RuntimeWarning)
        model: nn.Module = peft.get_peft_model(base, adapters, **options)
    return model


def _peft_for(adapters: Any) -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError("adapters need the package peft: pip install peft") from None
    if not isinstance(adapters, peft.LoraConfig):
        raise TypeError(f"adapters must be a peft.LoraConfig, not {type(adapters).__name__}")
    return peft


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    number = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype)
    return nn.Parameter(number.expand(parameter.shape), requires_grad=parameter.requires_grad)


def _check_blind(adapters: Any) -> None:
    """Refuse adapters whose initial values depend on the weights."""
    if adapters.init_lora_weights not in _BLIND_STARTS:
        raise ValueError(
            f"init_lora_weights={adapters.init_lora_weights!r} starts from the base's weights, "
            f"which are streamed in later: {_IN_MEMORY}"
        )
    for option in ("use_dora", "modules_to_save", "trainable_token_indices"):
        if getattr(adapters, option, None):
            raise ValueError(
                f"{option} copies or measures the base's weights, which are streamed in later: "
                f"{_IN_MEMORY}"
            )
