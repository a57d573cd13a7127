"""``bf16=True`` around the blocks: outputs in fp32, and the model's ends under autocast.

accelerate runs a whole model so. Here blocks compute in bf16 anyway; but a loss that is computed in
bf16 has three digits, too few to compare evaluations by, and inputs in fp32 (a spectrogram, say) do
not meet weights in bf16. Causal language models compute their loss in fp32 by themselves: of these
only the outputs change, for losses that are computed from logits.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from outcore.engine.model_patches import replace_attribute
from outcore.engine.offload import engine_of


def compute_as_autocast_does(model: nn.Module) -> None:
    """Give the offloaded ``model`` what ``bf16=True`` means in a Trainer, until it is released."""
    forward = vars(model).get("forward", model.forward)
    if hasattr(forward, "_outcore_converts"):
        return
    engine = engine_of(model)
    if not _is_causal(model):
        forward = torch.autocast(engine.device.type, dtype=torch.bfloat16)(forward)
    converted = convert_outputs_to_fp32(forward)
    converted._outcore_converts = True
    replace_attribute(engine, model, "forward", converted)


def _is_causal(model: nn.Module) -> bool:
    get_base = getattr(model, "get_base_model", None)  # PEFT's
    base = model if get_base is None else get_base()
    return any(kind.__name__ in _causal_names() for kind in type(base).__mro__)


@functools.cache
def _causal_names() -> frozenset[str]:
    from transformers.models.auto import modeling_auto

    classes: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    tuples = (names if isinstance(names, tuple) else (names,) for names in classes)
    return frozenset(chain.from_iterable(tuples))
