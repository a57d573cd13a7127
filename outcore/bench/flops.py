"""How many floating-point operations a training step is worth.

Every speed in this project is counted one way:

    6 · (block parameters + head parameters) · tokens + 6 · layers · sequences · seq_len² · hidden

The embedding table is a lookup and does not count; the head is a matrix product and counts even
when it shares the embedding's weights. Causal attention counts at half, recomputation never, and
of a mixture-of-experts block only the experts that a token visits. A sliding attention window is
not taken into account: such models are counted as if every layer attended to everything before it.
The counting itself is `model_spec`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outcore.model_spec import model_spec

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
    return model_spec(config).step_flops(sequences, seq_len)


def count_parameters(config: PretrainedConfig) -> ParameterCounts:
    """Counts from a model on the meta device: no weights are made."""
    spec = model_spec(config)
    if not spec.head_parameters:
        raise ValueError(f"{spec.name} has no output head to count")
    return ParameterCounts(
        total=spec.num_parameters,
        blocks=sum(block.parameters for block in spec.blocks),
        blocks_active=sum(block.active_parameters for block in spec.blocks),
        head=spec.head_parameters,
    )


def block_list(model: PreTrainedModel) -> nn.ModuleList:
    """The model's repeated blocks: its heaviest module list, whatever the family calls it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks")
    # Lists nested in blocks (experts) come later in modules() and weigh less; max keeps the first.
    return max(lists, key=_numel)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
