"""What a model is made of, as numbers: parameters, bytes, operations and activations by block.

Read from a configuration on the meta device with the engine's own block finder, so that blocks and
edges are those that will be streamed. No weights are needed. Also the one place where operations
are counted: ``ModelSpec.step_flops`` for the speeds that are printed, ``BlockSpec`` for the work
that a device really does.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from outcore.adapters import with_adapters_on_meta
from outcore.attention_spec import Attention, attention_of
from outcore.blocks import Part, end_module, find_parts, runs_as_block
from outcore.kernels.packed_format import packed_format
from outcore.model_config import check_layers, first_line, longest_sequence, read_config
from outcore.model_directory import config_directory, is_hub_id
from outcore.saved_activations import dropped_elements, eager_elements, is_norm, saved_elements
from outcore.shapes import config_from_dict, shape_config, shape_names
from outcore.store.packed_spans import is_packable, packed_bytes
from outcore.store.spans import SpanLayout, aligned_numel
from outcore.units import BYTES_OF

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One block. ``numel`` and ``trainable_numel`` are elements of its aligned span."""

    name: str
    kind: str
    parameters: int
    trainable_parameters: int
    active_parameters: float  # experts scaled to those that a token visits
    numel: int
    trainable_numel: int
    attention: Attention | None
    input_elements_per_token: int
    kept_elements_per_token: float  # what autograd saves, without weights and the input; compiled
    kept_statistics_per_token: int  # fp32 values beside them: log-sum-exp, norms
    widest_elements_per_token: float  # the widest layer's output: gradients come in this size
    remade_elements_per_token: float = 0.0  # compiled, not saved for the backward, but made in it
    # Compiled, what the widest layer has beside what is saved, while it is differentiated.
    beside_remade_per_token: float = 0.0
    beside_all_kept_per_token: float = 0.0  # where nothing is remade
    dropped_elements_per_token: int = 0  # that dropouts of compiled blocks have a byte of mask for
    # Saved more where nothing is compiled: by type, since norms of bf16 save in fp32.
    eager_fp32_elements_per_token: float = 0.0
    eager_bf16_elements_per_token: float = 0.0
    frozen_matrices: tuple[torch.Size, ...] = ()  # those that frozen_weights applies to
    # Elements of routers and stacks of experts' matrices that PEFT adds adapters to, in a copy.
    adapted_stacks: tuple[int, ...] = ()

    def weight_bytes(self, dtype: str) -> int:
        return self.numel * BYTES_OF[dtype]

    def span_numel(self, dtype: str, frozen_weights: str | None) -> int:
        """Return the elements of the span that moves, with its frozen matrices packed or not."""
        format = packed_format(frozen_weights)
        if format is None:
            return self.numel
        packed = packed_bytes(self.frozen_matrices, format) // BYTES_OF[dtype]
        return self.numel - self.expanded_numel(frozen_weights) + packed

    def expanded_numel(self, frozen_weights: str | None) -> int:
        """Return the elements that packed matrices take on the device while the block runs."""
        if frozen_weights is None:
            return 0
        return sum(aligned_numel(shape.numel()) for shape in self.frozen_matrices)

    @property
    def forward_flops_per_token(self) -> float:
        """Matrix products only; a multiplication and an addition for each parameter."""
        return 2.0 * self.active_parameters

    def attention_flops(self, seq_len: int) -> float:
        """Return the forward attention operations of one sequence."""
        return self.attention.forward_flops(seq_len) if self.attention is not None else 0.0

    def input_bytes_per_token(self, dtype: str) -> int:
        return self.input_elements_per_token * BYTES_OF[dtype]

    def kept_bytes_per_token(
        self, dtype: str, *, is_compiled: bool = True, saves_little: bool = True
    ) -> float:
        """Return the activations of a kept block, without its input, masks and scores."""
        is_remade = is_compiled and saves_little
        remade = self.remade_elements_per_token * BYTES_OF[dtype] if is_remade else 0.0
        return self.graph_bytes_per_token(dtype, is_compiled=is_compiled) - remade

    def graph_bytes_per_token(self, dtype: str, *, is_compiled: bool = True) -> float:
        """Return what the backward of a block reads, without its input, masks and scores."""
        elements = self.kept_elements_per_token + self.remade_elements_per_token
        if not is_compiled:
            in_fp32, in_bf16 = (
                self.eager_fp32_elements_per_token,
                self.eager_bf16_elements_per_token,
            )
            elements += in_bf16 if dtype == "bf16" else in_fp32
        masks = self.dropped_elements_per_token if is_compiled else 0  # else among the elements
        return elements * BYTES_OF[dtype] + 4 * self.kept_statistics_per_token + masks

    def derivative_bytes_per_token(self, dtype: str, *, saves_little: bool) -> float:
        """Return what a compiled backward has beside what is kept, at its widest layer."""
        remade, all_kept = self.beside_remade_per_token, self.beside_all_kept_per_token
        return (remade if saves_little else all_kept) * BYTES_OF[dtype]

    def gradient_bytes_per_token(self, dtype: str, *, is_compiled: bool) -> float:
        """Return what stands beside the activations while a micro-batch is differentiated.

        Compiled, gradients take the activations' place one by one. Otherwise those of both
        factors of the widest layer are there too. An adapter's product stands beside its layer's
        until both are added, and so do their gradients: four of the widest, by measurement.
        """
        widest = 0 if is_compiled else 2
        if self.frozen_matrices and self.trainable_parameters:
            widest += 4
        return widest * self.widest_elements_per_token * BYTES_OF[dtype]


@dataclass(frozen=True, kw_only=True)
class EdgeSpec:
    """What no block holds: embedding, final norm, head."""

    name: str
    parameters: int
    numel: int
    trainable_numel: int
    deliveries: tuple[int, ...]  # elements whose gradients arrive together
    runs_as_block: bool  # norm-like: its input is held like a block's
    num_blocks_before: int  # in the order of definition


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it. ``blocks`` and ``edges`` are in the order of definition."""

    name: str
    blocks: tuple[BlockSpec, ...]
    edges: tuple[EdgeSpec, ...]
    hidden_size: int
    vocabulary: int  # rows of the head; 0 without one
    head_parameters: int  # counted also when tied to the embedding
    is_tied: bool
    longest_sequence: int | None = None  # that it was made for, where its configuration says so

    @property
    def num_parameters(self) -> int:
        return sum(b.parameters for b in self.blocks) + sum(e.parameters for e in self.edges)

    @property
    def frozen_parameters(self) -> int:
        """Parameters that are not trained."""
        trained = sum(b.trainable_parameters for b in self.blocks)
        trained += sum(min(e.parameters, sum(e.deliveries)) for e in self.edges)
        return self.num_parameters - trained

    def frozen_bytes(self, frozen_weights: str | None) -> int:
        """Return what frozen parameters take: in bf16, or as matrices of blocks are packed."""
        spans = sum(b.span_numel("bf16", frozen_weights) - b.trainable_numel for b in self.blocks)
        spans += sum(e.numel - e.trainable_numel for e in self.edges)
        return spans * BYTES_OF["bf16"]

    @property
    def active_parameters(self) -> float:
        """Parameters that one token's products use: blocks and head."""
        return sum(b.active_parameters for b in self.blocks) + self.head_parameters

    @property
    def is_moe(self) -> bool:
        return any(b.active_parameters < b.parameters for b in self.blocks)

    def step_flops(self, sequences: int, seq_len: int) -> float:
        """Return what a training step counts as, by the rule of every speed that is printed:

        6 · (block + head parameters) · tokens + 6 · layers · sequences · seq_len² · hidden. Only
        visited experts count, recomputation never does; windows and uneven head sizes are not
        looked at, so that figures compare. Frozen parameters of blocks have no gradient of their
        own: for their share everything counts at 4 instead of 6.
        """
        tokens = sequences * seq_len
        attention = 6 * len(self.blocks) * sequences * seq_len**2 * self.hidden_size
        trained = sum(b.trainable_parameters for b in self.blocks)
        frozen_share = 1 - trained / sum(b.parameters for b in self.blocks)
        usual = 6 * self.active_parameters * tokens + float(attention)
        return usual * (1 - frozen_share / 3)


def model_spec(
    source: str | Path | PretrainedConfig | Mapping[str, Any], *, adapters: Any = None
) -> ModelSpec:
    """Return the spec of a shape, a Hugging Face directory or id, a config, or its plain values.

    Of a model on the Hub only config.json is fetched, where the cache does not have it.

    adapters: a ``peft.LoraConfig``, for the model with these over a frozen base.
    """
    config, name = _config_of(source)
    check_layers(config)
    model = model_without_values(config, name)
    if adapters is not None:
        model = with_adapters_on_meta(model, adapters)
    return spec_of_model(model, name=name)


def model_without_values(config: Any, name: str) -> Any:
    """Return the model on the meta device; ValueError where its configuration allows none."""
    try:
        # Drawing initial values of a 405B model takes seconds even where nothing is stored.
        with torch.device("meta"), no_init_weights():
            model = auto_class(config).from_config(copy.deepcopy(config))
    except Exception as error:  # whatever its class raises about sizes that cannot be
        raise ValueError(f"{name}: its config makes no model ({first_line(error)})") from error
    model.tie_weights()  # part of the initialization that was left out
    return model


def spec_of_model(model: nn.Module, *, name: str | None = None) -> ModelSpec:
    """Return the spec of a Hugging Face model; its parameters may be on the meta device."""
    config: Any = model.config
    text = config.get_text_config()
    parts = find_parts(model)
    ends = [end_module(model, "input"), end_module(model, "output")]
    embedding, head = (_weight(end) for end in ends)
    blocks: list[BlockSpec] = []
    edges: list[EdgeSpec] = []
    index_in_list: dict[str, int] = {}
    for part in parts:
        if part.is_block:
            parent = part.name.rpartition(".")[0]
            index = index_in_list.get(parent, 0)
            index_in_list[parent] = index + 1
            blocks.append(_block_spec(part, text, index))
        else:
            edges.append(_edge_spec(part, ends, len(blocks)))
    return ModelSpec(
        name=name or str(getattr(config, "model_type", type(model).__name__)),
        blocks=tuple(blocks),
        edges=tuple(edges),
        hidden_size=int(text.hidden_size),
        vocabulary=0 if head is None else int(head.shape[0]),
        head_parameters=0 if head is None else head.numel(),
        is_tied=head is not None and head is embedding,
        longest_sequence=longest_sequence(config),
    )


def auto_class(config: Any) -> Any:
    """Return the auto class of the config's architecture; causal language models by default."""
    import transformers

    names = getattr(config, "architectures", None) or [""]
    for suffix, auto in (
        ("ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("ForMaskedLM", "AutoModelForMaskedLM"),
        ("ForSequenceClassification", "AutoModelForSequenceClassification"),
        ("ForTokenClassification", "AutoModelForTokenClassification"),
    ):
        if names[0].endswith(suffix):
            found = getattr(transformers, auto)
            # Models that see images generate "conditionally" too, without an encoder of text.
            images = transformers.AutoModelForImageTextToText
            is_known = type(config) in found._model_mapping
            return images if not is_known and type(config) in images._model_mapping else found
    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _config_of(source: str | Path | PretrainedConfig | Mapping[str, Any]) -> tuple[Any, str]:
    if isinstance(source, PretrainedConfig):
        return source, str(source.model_type)
    if isinstance(source, Mapping):
        return config_from_dict(source), str(source.get("model_type"))
    if not str(source).strip():
        raise ValueError("an empty name: write that of a directory, an id of the Hub or a shape")
    if str(source) in shape_names():
        return shape_config(str(source)), str(source)
    if is_hub_id(source):
        return _config_of_hub(str(source)), str(source)
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        name = file.absolute().parent.name if file.name == "config.json" else file.stem
        return read_config(file), name
    if path.is_dir():
        raise ValueError(f"{source} has no config.json: it is no Hugging Face model directory")
    close = _close_shapes(str(source))
    raise ValueError(
        f"{str(source)!r} is neither a Hugging Face directory (with a config.json), nor an id of "
        "the Hub (org/name), nor a shape"
        + (f": {close[0]}?" if close else ".")
        + f" Shapes: {', '.join(shape_names())}."
    )


def _config_of_hub(name: str) -> Any:
    try:
        file = config_directory(name) / "config.json"
    except ValueError as error:
        close = _close_shapes(name.partition("/")[2])
        hint = f". The shape {close[0]} needs no download" if close else ""
        raise ValueError(f"{error}{hint}") from error
    if not file.is_file():
        raise ValueError(f"{name} on the Hugging Face Hub has no config.json")
    return read_config(file)


def _close_shapes(name: str) -> list[str]:
    return difflib.get_close_matches(name.lower(), shape_names(), n=1)


def _weight(module: nn.Module | None) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def _edge_spec(part: Part, ends: list[nn.Module | None], num_blocks: int) -> EdgeSpec:
    layout = SpanLayout.of(part.parameters)
    is_norm_like = runs_as_block(part, ends)
    whole = (layout.trainable_numel,) if layout.trainable_numel else ()
    return EdgeSpec(
        name=part.name,
        parameters=sum(p.numel() for p in part.parameters.values()),
        numel=layout.numel,
        trainable_numel=layout.trainable_numel,
        deliveries=whole if is_norm_like else tuple(f.numel for f in layout.trainable),
        runs_as_block=is_norm_like,
        num_blocks_before=num_blocks,
    )


def _block_spec(part: Part, text: Any, index: int) -> BlockSpec:
    layout = SpanLayout.of(part.parameters)
    share = _active_expert_share(text)
    numels = {name: p.numel() for name, p in part.parameters.items()}
    is_decoder = ".decoder" in f".{part.name}" or not getattr(text, "is_encoder_decoder", False)
    crosses = bool(getattr(text, "is_encoder_decoder", False)) and is_decoder
    attention = attention_of(text, index, is_decoder=is_decoder, crosses=crosses)
    saved = saved_elements(part.module, text, share)
    num_norms = sum(is_norm(m) for m in part.module.modules())
    num_heads = 0 if attention is None else attention.num_heads * (2 if crosses else 1)
    hidden = int(text.hidden_size)
    return BlockSpec(
        name=part.name,
        kind=type(part.module).__name__ + ("" if share == 1 or not _experts(part) else " (MoE)"),
        parameters=sum(numels.values()),
        trainable_parameters=sum(f.numel for f in layout.trainable),
        active_parameters=sum(
            n * (share if "experts" in name.split(".") else 1.0) for name, n in numels.items()
        ),
        numel=layout.numel,
        trainable_numel=layout.trainable_numel,
        attention=attention,
        input_elements_per_token=hidden * (2 if crosses else 1),
        kept_elements_per_token=sum(saved.kept),
        remade_elements_per_token=sum(saved.remade),
        beside_remade_per_token=saved.when_remade,
        beside_all_kept_per_token=saved.when_all_kept,
        dropped_elements_per_token=dropped_elements(part.module, text),
        kept_statistics_per_token=num_heads + num_norms,
        widest_elements_per_token=max([hidden, *saved.all]),
        eager_fp32_elements_per_token=eager_elements(part.module, text, share, torch.float32),
        eager_bf16_elements_per_token=eager_elements(part.module, text, share, torch.bfloat16),
        frozen_matrices=tuple(
            p.shape for name, p in part.parameters.items() if is_packable(name, p)
        ),
        adapted_stacks=tuple(_adapted_stacks(part.module)),
    )


def _adapted_stacks(block: nn.Module) -> Iterator[int]:
    for module in block.modules():
        wrapper: Any = module
        if hasattr(wrapper, "parameter_name") and hasattr(wrapper, "get_base_layer"):
            yield getattr(wrapper.get_base_layer(), wrapper.parameter_name).numel()


def _experts(part: Part) -> bool:
    return any("experts" in name.split(".") for name in part.parameters)


def _active_expert_share(text: Any) -> float:
    for field in _EXPERT_COUNTS:
        num_experts = getattr(text, field, None)
        if num_experts:
            # Switch Transformers have no such field: a token visits one expert.
            return float(getattr(text, "num_experts_per_tok", 1) / num_experts)
    return 1.0
