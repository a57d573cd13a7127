"""Parameters whose values are kept in 8 or 4 bit: what a reader or writer gets to see.

The module's parameter is on the meta device: it has a shape and a type, and no memory. In a
``state_dict`` its place is taken by a ``PackedWeight``, which is expanded by whoever uses it, so
that saving needs no more memory than one shard; what is loaded is packed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outcore.errors import OutcoreError
from outcore.kernels.packed import unpack
from outcore.kernels.packed_format import PackedFormat
from outcore.store.ledger import Ledger
from outcore.store.packed_spans import PackedField
from outcore.store.spans import separate
from outcore.stream.unit import Unit

Replaced = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""By id: a parameter, and the one that took its place."""


_DATA: Any = vars(torch._C.TensorBase)["data"].__get__  # what reading .data calls


class PackedWeight(Tensor):
    """A frozen weight in 8 or 4 bit that any operation expands; it cannot be written."""

    codes: Tensor
    scales: Tensor
    format: PackedFormat

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scales: Tensor,
        format: PackedFormat,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> PackedWeight:
        weight: PackedWeight = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.device
        )
        weight.codes, weight.scales, weight.format = codes, scales, format
        return weight

    def expand_packed(self) -> Tensor:
        """Return the weight as an ordinary tensor."""
        return unpack(self.codes, self.scales, self.format, self.shape, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.dtype}, {self.format.name})"

    # Writers of checkpoints tell by the storage which weights are tied.
    def untyped_storage(self) -> torch.UntypedStorage:
        return self.codes.untyped_storage()

    def storage(self) -> Any:
        return self.codes.storage()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__, _DATA):
            return func(args[0].expand_packed(), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # float(), contiguous() or cpu() return the tensor itself where nothing is left to do.
        if isinstance(result, PackedWeight) and func is not Tensor.detach:
            return result.expand_packed()
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            weight = args[0]
            meta = weight.format, weight.shape, weight.dtype
            return PackedWeight(weight.codes, weight.scales, *meta)
        schema = func._schema
        for argument, value in zip(schema.arguments, args, strict=False):
            alias = argument.alias_info
            if isinstance(value, PackedWeight) and alias is not None and alias.is_write:
                raise RuntimeError(
                    f"{schema.name}: a weight in {value.format.name} cannot be written; load other "
                    "values with load_state_dict, or call outcore.release(model) first"
                )

        def expanded(value: Any) -> Any:
            return value.expand_packed() if isinstance(value, PackedWeight) else value

        args, kwargs = torch.utils._pytree.tree_map(expanded, (args, kwargs or {}))
        return func(*args, **kwargs)


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the parameter ``name``, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def replace_parameter(unit: Unit, name: str, values: Tensor, replaced: Replaced) -> None:
    """Put a new parameter in the place of one that has other memory."""
    before = unit.parameters[name]
    owner, leaf = owner_of(unit.part.module, name)
    made = nn.Parameter(values, requires_grad=before.requires_grad)
    owner._parameters[leaf] = unit.parameters[name] = made
    replaced[id(before)] = before, made


def hook_packed_parameters(units: Sequence[Unit], device: torch.device) -> list[Callable[[], None]]:
    """Have every packed parameter show in ``state_dict``, and take what is loaded.

    Returns what undoes it.
    """
    undo = []
    for unit in units:
        for field in unit.packed.fields if unit.packed is not None else ():
            owner, leaf = owner_of(unit.part.module, field.name)
            show = functools.partial(_show, unit, field, leaf)
            take = functools.partial(_take, unit, field, leaf, device)
            undo.append(owner.register_state_dict_post_hook(show).remove)
            undo.append(owner.register_load_state_dict_pre_hook(take).remove)
    return undo


def packed_weight(unit: Unit, field: PackedField) -> PackedWeight:
    """Return the weight as it is in its home."""
    assert unit.packed is not None
    codes, scales = unit.packed.parts(unit.packed_span(unit.home), field)
    return PackedWeight(
        separate(codes, codes.shape), scales, unit.packed.format, field.shape, unit.dtype
    )


def _show(
    unit: Unit, field: PackedField, leaf: str, module: nn.Module, state: Any, prefix: str, *_: Any
) -> None:
    state[prefix + leaf] = packed_weight(unit, field)


def _take(
    unit: Unit,
    field: PackedField,
    leaf: str,
    device: torch.device,
    module: nn.Module,
    state: Any,
    prefix: str,
    *_: Any,
) -> None:
    values = state.get(prefix + leaf)
    if not isinstance(values, Tensor) or values.shape != field.shape or values.is_meta:
        return  # torch says what is wrong with it
    assert unit.packed is not None
    if isinstance(values, PackedWeight) and values.format == unit.packed.format:
        codes, scales = unit.packed.parts(unit.packed_span(unit.home), field)
        codes.copy_(values.codes)
        scales.copy_(values.scales)
    else:
        unit.packed.store(unit.packed_span(unit.home), field, values, device)
    state[prefix + leaf] = torch.empty(field.shape, dtype=unit.dtype, device="meta")


def packed_versions(units: Sequence[Unit]) -> dict[str, int]:
    """Return how often each packed parameter was written, by its full name."""
    return {
        unit.full_name(field.name): unit.parameters[field.name]._version
        for unit in units
        for field in (unit.packed.fields if unit.packed is not None else ())
    }


def check_not_written(units: Sequence[Unit], seen: dict[str, int]) -> None:
    """Refuse to go on where a packed parameter was written: it has no memory that could keep it."""
    for name, version in packed_versions(units).items():
        if version != seen[name]:
            raise OutcoreError(
                f"{name} was written in place, but its values are kept in 8 or 4 bit elsewhere: "
                "load them with load_state_dict, or call outcore.release(model) first"
            )


def check_room_to_expand(units: Sequence[Unit], ledger: Ledger) -> None:
    """Refuse to expand what the host's memory does not hold."""
    num_bytes = sum(
        unit.packed.expanded.numel * unit.dtype.itemsize
        for unit in units
        if unit.packed is not None and unit.host_weight is not None
    )
    ledger.check(
        "expanded weights",
        num_bytes,
        remedy="Save the adapters, or save_pretrained, while the model is offloaded.",
    )


def expand_parameters(units: Sequence[Unit]) -> Replaced:
    """Give packed parameters memory of their own, in the unit's home tier, with their values."""
    replaced: Replaced = {}
    for unit in units:
        for field in unit.packed.fields if unit.packed is not None else ():
            values = packed_weight(unit, field).expand_packed()
            replace_parameter(unit, field.name, values, replaced)
    return replaced
