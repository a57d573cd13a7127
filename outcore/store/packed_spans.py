"""Packed matrices of one block as one span of bytes: the codes and scales of each, aligned.

Beside it lies the expanded form: the same matrices in a plain span, which is what the block's
forward is given. ``is_packable`` says which parameters are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.kernels.packed import unpack_
from outcore.kernels.packed_format import PackedFormat
from outcore.store.spans import SpanLayout

MIN_ELEMENTS = 1 << 12  # of a matrix: smaller ones are no burden
MIN_COLUMNS = 32  # shorter rows are filled up with zeros
ROUTERS = ("gate", "router")  # modules that choose experts: small, and a rounding changes a choice
_ROWS_AT_ONCE_ELEMENTS = 1 << 24
_ALIGN_BYTES = 512  # a multiple of every aligned element's: the span may follow a plain one


def is_packable(name: str, parameter: Tensor) -> bool:
    """Whether frozen_weights applies: frozen matrices, and the stacked ones of fused experts."""
    return (
        not parameter.requires_grad
        and parameter.dim() in (2, 3)
        and parameter.numel() >= MIN_ELEMENTS
        and parameter.shape[-1] >= MIN_COLUMNS
        and not any(piece in ROUTERS for piece in name.split("."))
    )


def packed_bytes(shapes: Iterable[torch.Size], format: PackedFormat) -> int:
    """Return the bytes of the packed span of matrices of these shapes."""
    return sum(
        _aligned(format.code_bytes(shape)) + _aligned(2 * format.num_blocks(shape))
        for shape in shapes
    )


@dataclass(frozen=True, kw_only=True)
class PackedField:
    """One matrix's place in a packed span, in bytes."""

    name: str
    shape: torch.Size
    codes_offset: int
    code_bytes: int
    scales_offset: int
    scale_bytes: int


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """The packed matrices of a block; ``expanded`` is their plain span."""

    format: PackedFormat
    fields: tuple[PackedField, ...]
    num_bytes: int
    expanded: SpanLayout

    @classmethod
    def of(cls, matrices: Mapping[str, Tensor], format: PackedFormat) -> PackedLayout:
        fields = []
        offset = 0
        for name, matrix in matrices.items():
            code_bytes = format.code_bytes(matrix.shape)
            scale_bytes = 2 * format.num_blocks(matrix.shape)
            scales_offset = offset + _aligned(code_bytes)
            fields.append(
                PackedField(
                    name=name,
                    shape=matrix.shape,
                    codes_offset=offset,
                    code_bytes=code_bytes,
                    scales_offset=scales_offset,
                    scale_bytes=scale_bytes,
                )
            )
            offset = scales_offset + _aligned(scale_bytes)
        return cls(
            format=format,
            fields=tuple(fields),
            num_bytes=offset,
            expanded=SpanLayout.of(matrices),
        )

    def field(self, name: str) -> PackedField:
        return next(field for field in self.fields if field.name == name)

    def parts(self, span: Tensor, field: PackedField) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a field as views of ``span``, the bytes of all."""
        codes = span[field.codes_offset : field.codes_offset + field.code_bytes]
        scales = span[field.scales_offset : field.scales_offset + field.scale_bytes]
        return codes, scales.view(torch.bfloat16)

    def store(
        self,
        span: Tensor,
        field: PackedField,
        values: Tensor,
        device: torch.device,
        *,
        first_row: int = 0,
    ) -> None:
        """Pack rows of a matrix, on ``device``, into their place in ``span``, some at a time."""
        codes, scales = self.parts(span, field)
        matrix = values.detach().reshape(-1, values.shape[-1])
        before = torch.Size((first_row, matrix.shape[1]))
        first_code, first_scale = self.format.code_bytes(before), self.format.num_blocks(before)
        for rows in matrix.split(max(1, _ROWS_AT_ONCE_ELEMENTS // matrix.shape[1])):
            packed, scale = self.format.pack(rows.to(device))
            codes[first_code : first_code + packed.numel()].copy_(packed)
            scales[first_scale : first_scale + scale.numel()].copy_(scale)
            first_code += packed.numel()
            first_scale += scale.numel()

    def expand_(self, span: Tensor, flat: Tensor) -> None:
        """Expand every matrix of ``span`` into ``flat``, a plain span of the expanded layout."""
        places = self.expanded.views(flat)
        for field in self.fields:
            codes, scales = self.parts(span, field)
            unpack_(places[field.name], codes, scales, self.format)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
