"""What autograd saves of a block for its backward, in elements a token.

Two counts: of a compiled block, by its matrix products; and what comes on top of that where nothing
is compiled, by running the small modules between the products on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Of the hidden states of one micro-batch. Blocks of so many tokens are seldom kept, and a backward
# that remakes what was not saved has two more of the widest tensors at a time.
LONG_HIDDEN_BYTES = 256 << 20

_EXPERT_SIZES = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class _Inside:
    """What a small module saves for each element, beside input, output and parameters."""

    elements: float  # of the type that it was given
    copies_input: bool  # saves its input in a wider type, and not the input itself


# By a module's class, settings, what of it is trained, width and type: a model has the same few in
# every block.
_Key = tuple[type[nn.Module], str, tuple[bool, ...], int, torch.dtype]
_found_inside: dict[_Key, _Inside] = {}


@dataclass(frozen=True, kw_only=True)
class SavedElements:
    """Sizes, per token, of what the backward of a compiled block reads."""

    kept: tuple[float, ...]  # saved by the forward
    remade: tuple[float, ...]  # made from these while the backward runs
    # Beside what is kept, while the widest layer between two products is differentiated:
    when_remade: float
    when_all_kept: float  # beside everything, where nothing is remade

    @property
    def all(self) -> tuple[float, ...]:
        return *self.kept, *self.remade


def saves_little(hidden_bytes: int) -> bool:
    """Whether a compiled block saves little, by the hidden states of a micro-batch.

    By their shape alone: a block has the same bits kept, recomputed and wherever it lives.
    """
    return hidden_bytes < LONG_HIDDEN_BYTES


def saved_elements(block: nn.Module, text: Any, share: float) -> SavedElements:
    """Return the sizes of what a compiled block's backward reads, without weights and input.

    Each distinct input of a matrix product and each product's output, less the last one, which is
    the next block's input unless a norm reads it first: outputs stand for what comes between two
    products (rotated queries, the residual stream), which is saved once; of an adapter, what is
    between its two products. Inputs that are an activation or a norm away from outputs are remade,
    attention's output is not, nor anything around experts. Exact for Llama-like blocks with the
    default attention.
    """
    inputs: list[float] = []
    remade: list[float] = []
    outputs: list[float] = []
    when_remade: list[float] = []
    when_all_kept: list[float] = []
    has_experts = share != 1 and any(_expert_elements(m, text, share) for m in block.modules())
    begins_with_norm = any(not name.startswith("post") for name in _own_norms(block))
    inside_adapters = {
        id(inner)
        for module in block.modules()
        if hasattr(module, "base_layer")
        for inner in module.modules()
    }
    for parent in block.modules():
        of_experts = _expert_elements(parent, text, share)
        inputs += of_experts
        if of_experts:
            when_remade.append(2 * of_experts[1])
            when_all_kept.append(of_experts[1] + of_experts[2])
        inputs += [int(first.out_features) for first in _first_of_adapters(parent)]
        inputs += _magnitude_elements(parent)
        if id(parent) in inside_adapters:
            continue  # its base is seen from outside, as if there were no adapter
        linears = list(_linears(parent))
        inputs.append(_rotated_elements(parent, linears, text))
        widths = [width for _, width, _ in linears]
        if len(linears) > 1 and not _is_attention(parent):
            # One kernel makes what the last product took and the gradients of what the first ones
            # gave: of two factors, beside both of them and the gradient that it reads. Otherwise
            # what the last one took is gone by then, and a gradient takes one factor's place.
            given = sum(out for *_, out in linears[:-1])
            when_remade.append(2 * given)
            when_all_kept.append(given - widths[-1] if len(linears) > 2 else given)
        for position, (name, width, out) in enumerate(linears):
            # Queries, keys and values read one tensor; the projection after them another.
            is_last = position == len(linears) - 1 and not name.startswith("v")
            if width not in widths[:position] or (is_last and len(linears) > 1):
                follows_norm = position == 0 and begins_with_norm
                is_remade = follows_norm if _is_attention(parent) else len(linears) > 1
                (remade if is_remade and not has_experts else inputs).append(width)
            outputs.append(out)
            if hasattr(parent, f"{name[0]}_norm"):  # normed queries beside the raw ones
                outputs.append(out)
    last = len(outputs) if _ends_with_norm(block) else len(outputs) - 1
    return SavedElements(
        kept=(*inputs, *outputs[:last]),
        remade=tuple(remade),
        when_remade=max(when_remade, default=0.0),
        when_all_kept=max(when_all_kept, default=0.0),
    )


def _own_norms(block: nn.Module) -> list[str]:
    return [name for name, child in block.named_children() if is_norm(child)]


def _ends_with_norm(block: nn.Module) -> bool:
    """Whether norms are before and after each half of a block, as in Gemma."""
    return len(_own_norms(block)) > 3


def _first_of_adapters(layer: nn.Module) -> Iterator[Any]:
    """Yield the first product of each adapter that LoRA has put beside a layer.

    Those beside a stack of experts' matrices are multiplied with each other, not with tokens.
    """
    firsts = getattr(layer, "lora_A", None)
    if isinstance(firsts, nn.ModuleDict) and not hasattr(layer, "parameter_name"):
        yield from (first for first in firsts.values() if hasattr(first, "out_features"))


def _magnitude_elements(layer: nn.Module) -> list[float]:
    """Return what DoRA scales in an adapted layer, beside what goes on: it saves both factors."""
    magnitudes = getattr(layer, "lora_magnitude_vector", None)
    if not isinstance(magnitudes, nn.ModuleDict):
        return []
    return [float(p.numel()) for p in magnitudes.parameters()]


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _linears(parent: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield (name, in, out) of the parent's own matrix products."""
    for name, wrapped in parent.named_children():
        child = getattr(wrapped, "base_layer", wrapped)  # LoRA's own products are narrow
        weight = getattr(child, "weight", None)
        if next(child.children(), None) is None and weight is not None and weight.dim() == 2:
            if hasattr(child, "in_features"):
                yield name, int(child.in_features), int(child.out_features)  # type: ignore[arg-type]
            elif hasattr(child, "nf"):  # GPT-2's transposed product
                yield name, int(weight.shape[0]), int(weight.shape[1])


def _expert_elements(module: nn.Module, text: Any, share: float) -> list[float]:
    """Return what the experts that a token visits save: input, gate and up, product, output."""
    own = dict(module.named_parameters(recurse=False))
    if share == 1 or not any(p.dim() == 3 for p in own.values()):
        return []
    num_visited = float(getattr(text, "num_experts_per_tok", 1))
    hidden = int(text.hidden_size)
    size = next(int(getattr(text, n)) for n in _EXPERT_SIZES if getattr(text, n, None))
    return [num_visited * n for n in (hidden, 2 * size, size, hidden)]


def eager_elements(block: nn.Module, text: Any, share: float, dtype: torch.dtype) -> float:
    """Return what is saved more where nothing is compiled, in elements of ``dtype``.

    Inside norms, activations and dropouts: what these save of a row beside its input and output.
    In a gated layer also the activation's output, which is multiplied by the gate. Of the norms,
    the first reads the block's input and the second what attention left; others have their own.
    """
    total, num_norms, hidden = 0.0, 0, int(text.hidden_size)
    dropout_widths = _adapter_dropouts(block)
    for parent in block.modules():
        linears = list(_linears(parent))
        inner, is_gated = _inner_width(linears), _is_gated(linears)
        experts = _expert_elements(parent, text, share)
        if experts:
            inner, is_gated = experts[2], True
            total += 2 * hidden  # what attention left, and the router's input
        if _rotated_elements(parent, linears, text):
            total += hidden  # the output is copied
        total += _dropped_copies(parent)
        for name, child in parent.named_children():
            if next(child.children(), None) is not None:
                continue
            if is_norm(child):
                numel = next(child.parameters()).numel()
                # A norm of single heads follows the product of its name: q_norm after q_proj.
                outs = [out for of, _, out in linears if f"{of[0]}_norm" == name]
                inside = _saved_inside(child, numel, dtype)
                num_norms += numel == hidden and not outs
                is_first = num_norms == 1 and not outs  # its input is there in any case
                is_let_go = inside.copies_input and not is_first
                total += max([numel, *outs]) * (inside.elements - is_let_go)
            elif isinstance(child, nn.Dropout):
                width = dropout_widths.get(id(child), hidden)
                total += width * _saved_inside(child, 1, dtype).elements
            elif inner and next(child.parameters(), None) is None:
                total += inner * (_saved_inside(child, 1, dtype).elements + is_gated)
    return total + (max(0, num_norms - 2) - _ends_with_norm(block)) * hidden


def dropped_elements(block: nn.Module, text: Any) -> int:
    """Return the elements, per token, that dropouts of a block have a mask for."""
    widths = _adapter_dropouts(block)
    dropouts = [m for m in block.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    return sum(widths.get(id(dropout), int(text.hidden_size)) for dropout in dropouts)


def _adapter_dropouts(block: nn.Module) -> dict[int, int]:
    """Return the widths of the dropouts before adapters: those of what their layers take."""
    widths: dict[int, int] = {}
    for layer in block.modules():
        width = _input_width(getattr(layer, "base_layer", None))
        if width:
            dropouts = (inner for inner in layer.modules() if isinstance(inner, nn.Dropout))
            widths.update((id(dropout), width) for dropout in dropouts)
    return widths


def _dropped_copies(parent: nn.Module) -> float:
    """Return what dropouts leave for adapters, beside the one input that their layers share.

    Attention's own output stays beside what is left of it.
    """
    total, seen = 0.0, set[int]()
    for layer in parent.children():
        width = _input_width(getattr(layer, "base_layer", None))
        if width and any(isinstance(m, nn.Dropout) and m.p > 0 for m in layer.modules()):
            if width in seen or (seen and _is_attention(parent)):
                total += width
            seen.add(width)
    return total


def _input_width(layer: Any) -> int:
    """Return the width of what a matrix product takes; 0 of anything else."""
    if hasattr(layer, "nf"):  # GPT-2's transposed product
        return int(layer.weight.shape[0])
    return int(getattr(layer, "in_features", 0))


def _rotated_elements(parent: nn.Module, linears: list[tuple[str, int, int]], text: Any) -> int:
    """Return the rotated queries and keys of one product for queries, keys and values.

    The values hold on to all of what they were made with.
    """
    is_fused = len(linears) == 2 and _is_attention(parent)
    if not (is_fused and getattr(text, "rope_parameters", None)):
        return 0
    (_, inner, _), (_, _, out) = sorted(linears, key=lambda linear: linear[2])
    num_heads = text.num_attention_heads
    values = inner // num_heads * (getattr(text, "num_key_value_heads", None) or num_heads)
    return out - values if out == inner + 2 * values else 0


def _inner_width(linears: list[tuple[str, int, int]]) -> float:
    """Return the width between the first products and the last one; 0 without any."""
    return float(linears[-1][1]) if len(linears) > 1 else 0.0


def _is_gated(linears: list[tuple[str, int, int]]) -> bool:
    """Whether the first products make more than the last one takes: gate and up."""
    return len(linears) > 1 and sum(out for _, _, out in linears[:-1]) > linears[-1][1]


def _saved_inside(module: nn.Module, width: int, dtype: torch.dtype) -> _Inside:
    # A frozen weight needs no gradient, and so not what it is multiplied with.
    is_trained = tuple(parameter.requires_grad for parameter in module.parameters())
    key = (type(module), repr(module), is_trained, width, dtype)
    if key not in _found_inside:
        _found_inside[key] = _look_inside(module, width, dtype)
    return _found_inside[key]


def _look_inside(module: nn.Module, width: int, dtype: torch.dtype) -> _Inside:
    module = copy.deepcopy(module).to("meta", dtype).train()
    x = torch.empty((1, 2, width), device="meta", dtype=dtype, requires_grad=True)
    saved: dict[int, Tensor] = {}

    def see(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor.detach()

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
            output = module(x)
    except Exception:  # any code of a model's; one that wants more than its input is no plain layer
        return _Inside(elements=1.0, copies_input=False)
    saves_input = x.untyped_storage()._cdata in saved
    for known in (x, output, *module.parameters()):
        saved.pop(known.untyped_storage()._cdata, None)
    rows = [t for t in saved.values() if t.numel() >= 2]  # not scalars, nor a weight plus one
    rows = [t for t in rows if t.shape[:2] == x.shape[:2]]
    is_wider = any(t.shape == x.shape and t.dtype.itemsize > dtype.itemsize for t in rows)
    return _Inside(
        elements=sum(t.nbytes for t in rows) / x.nbytes,
        copies_input=is_wider and not saves_input,
    )


def is_norm(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    is_leaf = next(module.children(), None) is None
    return is_leaf and bool(own) and all(p.dim() == 1 for p in own)
