"""Whether a model keeps packed documents apart, found from its code on the meta device.

transformers tells documents of one sequence by positions that start again, but only where a model's
forward hands them to its masks; some do not (Falcon, OPT, BLOOM, gpt-oss). And what a recurrence or
a convolution carries along, no mask stops (Mamba, LFM2, the linear attention of Qwen 3.5).
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import masking_utils

from outcore.model_spec import model_without_values

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def keeps_packed_documents_apart(config: Any) -> bool:
    """Return whether no token of such a model sees another document of its sequence."""
    model = model_without_values(config, str(config.model_type))
    return not _carries_along(model) and _masks_by_positions(model)


def _carries_along(model: Any) -> bool:
    """Whether tokens also meet outside of attention."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return not _ATTENTION.issuperset(layer_types) or any(
        isinstance(module, nn.Conv1d) for module in model.modules()
    )


class _Asked(BaseException):
    """Ends a forward: what it was run for is known. Nothing in a model would catch it."""


def _ask(*_: Any) -> NoReturn:
    raise _Asked


def _masks_by_positions(model: Any) -> bool:
    """Whether the forward comes to where transformers looks for packed documents."""
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    model.eval()
    with contextlib.suppress(Exception):  # some have a type that is checked (ModernBERT's decoder)
        model.config.pad_token_id = None  # or some look for it in the tokens, which have no values
    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _ask
    try:
        with torch.no_grad():
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except _Asked:
        return True
    except Exception:  # of layers that need values, which come behind the masks
        return False
    finally:
        masking_utils.find_packed_sequence_indices = look
    return False
