"""Flat spans: how the parameters of one block lie one after another in memory.

Every parameter starts at a multiple of ``ALIGN_ELEMENTS`` elements. cuBLAS picks kernels by
alignment, so equal alignment in every tier is part of bit-exactness, not only of speed.
Trainable parameters come first, so that gradients and optimizer state cover one prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN_ELEMENTS = 128  # 256 bytes of bf16, 512 of fp32


def aligned_numel(numel: int) -> int:
    """Return the elements that a parameter of ``numel`` takes in a span."""
    return -(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


@dataclass(frozen=True, kw_only=True)
class Field:
    """One parameter's place in a span, in elements."""

    name: str
    shape: torch.Size
    offset: int
    numel: int
    trainable: bool

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, kw_only=True)
class SpanLayout:
    """The fields of a span, and how many elements it has (``trainable_numel`` is a prefix)."""

    fields: tuple[Field, ...]
    numel: int
    trainable_numel: int

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> SpanLayout:
        fields = []
        offset = trainable_numel = 0
        # sorted() is stable: definition order is kept among the trainable and among the frozen
        for name, parameter in sorted(
            parameters.items(), key=lambda item: not item[1].requires_grad
        ):
            fields.append(
                Field(
                    name=name,
                    shape=parameter.shape,
                    offset=offset,
                    numel=parameter.numel(),
                    trainable=parameter.requires_grad,
                )
            )
            offset += aligned_numel(parameter.numel())
            if parameter.requires_grad:
                trainable_numel = offset
        return cls(fields=tuple(fields), numel=offset, trainable_numel=trainable_numel)

    @property
    def trainable(self) -> tuple[Field, ...]:
        """The fields that have a gradient and state; a parameter without elements has neither."""
        return tuple(field for field in self.fields if field.trainable and field.numel)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each field as a view of ``flat``, which holds the whole span."""
        return {f.name: flat[f.offset : f.end].view(f.shape) for f in self.fields}

    def over(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each field as a tensor of its own over the memory of ``flat``, in its storage."""
        storage, start = flat.untyped_storage(), flat.storage_offset()
        tensors = {}
        for f in self.fields:
            empty = flat.new_empty(0)
            tensors[f.name] = empty.set_(storage, start + f.offset, f.shape)  # type: ignore[call-overload]
        return tensors

    def separate(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each field as a tensor with a storage of its own over the memory of ``flat``.

        Writers of checkpoints take tensors in one storage for tied weights and copy them all.
        """
        return {f.name: separate(flat[f.offset : f.end], f.shape) for f in self.fields}


def separate(flat: Tensor, shape: torch.Size) -> Tensor:
    """Return the memory of a flat tensor as one of ``shape``, with a storage of its own."""
    start = flat.storage_offset() * flat.itemsize
    piece = flat.untyped_storage()[start : start + flat.nbytes]
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(piece, 0, shape)  # type: ignore[call-overload, no-any-return]
