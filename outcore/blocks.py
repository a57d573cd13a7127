"""What a model is made of: its repeated blocks, and the edges around them.

Blocks are found by structure, not by model name: the outermost ``nn.ModuleList`` s whose members
are composite modules of one class, or of a few classes that repeat (attention layers among Mamba
layers, cross-attention layers among others). What no block holds (embeddings, final norm, head) is
an edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from outcore.errors import UnsupportedModel


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module of the model together with the parameters that move with it.

    ``parameters`` maps names relative to ``module`` to parameters; for a block they are all that
    it holds, for an edge only those that the module owns itself.
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    is_block: bool


def find_parts(model: nn.Module) -> list[Part]:
    """Return the model's blocks and edges in the order of their definition.

    Raises UnsupportedModel when there are no repeated blocks, or when a parameter belongs to
    two blocks (its gradient would have two homes).
    """
    block_names = {name: module for name, module in _repeated_modules(model)}
    if not block_names:
        raise UnsupportedModel(
            f"{type(model).__name__} has no repeated blocks: looked for an nn.ModuleList with at "
            "least two members that have submodules and parameters of their own, of one class or "
            "of classes that repeat (decoder or encoder layers). A model without them has nothing "
            "to stream."
        )
    owner: dict[int, str] = {}
    of_blocks = {id(p) for block in block_names.values() for p in block.parameters()}
    parts: list[Part] = []
    for name, module in model.named_modules(remove_duplicate=True):
        if name in block_names:
            parameters = dict(module.named_parameters())
            for key, parameter in parameters.items():
                if id(parameter) in owner:
                    raise UnsupportedModel(
                        f"parameter {name}.{key} is shared with {owner[id(parameter)]}: a "
                        "parameter shared between blocks cannot move with both. Untie it "
                        "(give each block its own copy) before offloading."
                    )
                owner[id(parameter)] = f"{name}.{key}"
            parts.append(Part(name=name, module=module, parameters=parameters, is_block=True))
        elif not _inside(name, block_names):
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in of_blocks:
                    raise UnsupportedModel(
                        f"parameter {name}.{key} is shared with a parameter of a block: its "
                        "gradient would have two homes. Untie it (give each its own copy) before "
                        "offloading."
                    )
            own = {
                key: parameter
                for key, parameter in module.named_parameters(recurse=False)
                if id(parameter) not in owner
            }
            if own:
                owner.update({id(p): f"{name}.{key}".lstrip(".") for key, p in own.items()})
                parts.append(Part(name=name, module=module, parameters=own, is_block=False))
    return parts


def _repeated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each member of the outermost lists of repeated modules."""
    taken: set[str] = set()
    for name, module in model.named_modules():
        if _inside(name, taken) or not _is_repeated_list(module):
            continue
        taken.add(name)
        for key, member in module.named_children():
            yield (f"{name}.{key}" if name else key), member


def _is_repeated_list(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    if any(
        next(member.children(), None) is None or next(member.parameters(), None) is None
        for member in module
    ):
        return False
    classes = {type(member) for member in module}
    # Stages of several classes are not layers: what repeats is inside them.
    return len(classes) == 1 or (
        len(classes) < len(module)
        and not any(_is_repeated_list(m) for member in module for m in member.modules())
    )


def _inside(name: str, ancestors: dict[str, nn.Module] | set[str]) -> bool:
    pieces = name.split(".")
    return any(".".join(pieces[:depth]) in ancestors for depth in range(1, len(pieces)))


def end_module(model: nn.Module, side: str) -> nn.Module | None:
    """Return the model's "input" embedding or "output" head, None if it names none."""
    getter = getattr(model, f"get_{side}_embeddings", None)
    try:
        return getter() if getter is not None else None
    except (AttributeError, NotImplementedError):  # as models without one answer
        return None


def runs_as_block(part: Part, ends: Sequence[nn.Module | None]) -> bool:
    """Whether an edge is norm-like, so that it runs over micro-batches and is recomputed too."""
    return (
        not part.is_block
        and not any(part.module is end for end in ends)
        and next(part.module.children(), None) is None
        and not isinstance(part.module, nn.Embedding)
        and all(parameter.dim() == 1 for parameter in part.parameters.values())
        and len(part.parameters) == len(dict(part.module.named_parameters()))
    )
