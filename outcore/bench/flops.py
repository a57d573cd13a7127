"""How many floating-point operations a training step is worth.

Owns the one way in which every speed in this project is counted:

    6 · (block parameters + head parameters) · tokens + 6 · layers · sequences · seq_len² · hidden

The embedding table is a lookup and does not count; the head is a matrix product and counts even
when it shares the embedding's weights. Causal attention counts at half, recomputation never, and
of a mixture-of-experts block only the experts that a token visits. A sliding attention window is
not taken into account: such models are counted as if every layer attended to everything before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outcore.shapes import config_from_dict

__all__ = ["ParameterCounts", "block_list", "count_parameters", "step_flops"]


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """A model's parameters by the role they play in a step."""

    total: int
    """Every parameter once, tied weights too."""
    blocks: int
    blocks_active: float
    """`blocks`, with each group of experts scaled to the ones that a token visits."""
    head: int
    """The output projection, counted also when it is tied to the embedding."""


def step_flops(config: PretrainedConfig | Mapping[str, Any], sequences: int, seq_len: int) -> float:
    """The operations of one forward and backward over `sequences` sequences of `seq_len` tokens."""
    if not isinstance(config, PretrainedConfig):
        config = config_from_dict(config)
    counts = count_parameters(config)
    text = config.get_text_config()
    tokens = sequences * seq_len
    attention = 6 * text.num_hidden_layers * sequences * seq_len**2 * text.hidden_size
    return 6 * (counts.blocks_active + counts.head) * tokens + float(attention)


def count_parameters(config: PretrainedConfig) -> ParameterCounts:
    """Counts from a model on the meta device: no weights are made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = block_list(model)
    active_share = _active_expert_share(config)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head to count")
    return ParameterCounts(
        total=_numel(model),
        blocks=_numel(blocks),
        blocks_active=sum(
            parameter.numel() * (active_share if "experts" in name.split(".") else 1.0)
            for name, parameter in blocks.named_parameters()
        ),
        head=head.weight.numel(),
    )


def block_list(model: PreTrainedModel) -> nn.ModuleList:
    """The model's repeated blocks: its heaviest module list, whatever the family calls it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks")
    # Lists nested in blocks (experts) come later in modules() and weigh less; max keeps the first.
    return max(lists, key=_numel)


def _active_expert_share(config: PretrainedConfig) -> float:
    text = config.get_text_config()
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        num_experts = getattr(text, field, None)
        if num_experts:
            return float(text.num_experts_per_tok / num_experts)
    return 1.0


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
