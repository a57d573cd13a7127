"""How far off frozen weights are in 8 and 4 bit: the formats that are used, and those tried first.

    python benchmarks/frozen_formats.py --json FILE [--weights model.safetensors ...]

The error is the norm of the difference over the norm of the weights, over all matrices of a set:
drawn from a normal and from a heavy-tailed distribution, and those of real checkpoints. Runs on a
CPU in about a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from outcore.kernels.packed import unpack
from outcore.kernels.packed_format import FORMATS, LEVELS

# QLoRA's 4-bit NormalFloat.
NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)

Rounds = Callable[[Tensor], Tensor]  # (blocks, block) → what the format makes of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="safetensors files")
    arguments = parser.parse_args()
    sets = {"normal": [_normal(4096, 4096)], "Student's t, 5": [_heavy_tailed(4096, 4096)]}
    for file in arguments.weights:
        tensors = load_file(file)
        sets[file.name] = [w.float() for n, w in tensors.items() if w.dim() == 2 and "layer" in n]
    rows = []
    for name, bits, block, rounds in _formats():
        errors = {of: _error(weights, block, rounds) for of, weights in sets.items()}
        rows.append({"format": name, "bits": bits, "errors": errors})
        print(f"{name:44s} {bits:6.3f}  " + "  ".join(f"{e:.5f}" for e in errors.values()))
    matrices = {name: len(weights) for name, weights in sets.items()}
    arguments.json.write_text(json.dumps({"matrices": matrices, "rows": rows}, indent=1))


def _formats() -> list[tuple[str, float, int | None, Rounds]]:
    used = [
        (f"frozen_weights={f.name!r}", f.bits_per_weight, None, _packed(f.name))
        for f in FORMATS.values()
    ]
    tried: list[tuple[str, float, int | None, Rounds]] = [
        ("bf16", 16, 64, lambda blocks: blocks.bfloat16().float()),
        ("int8, blocks of 128", 8.125, 128, _int8),
        ("int8, one scale a row", 8.0, None, _int8),
        ("NF4, blocks of 64", 4.25, 64, _levels(NF4, is_signed=False)),
        ("NF4, blocks of 32", 4.5, 32, _levels(NF4, is_signed=False)),
        ("affine, blocks of 64", 4.5, 64, _affine),
        ("integers -8 to 7, signed scale, blocks of 32", 4.5, 32, _integers),
        ("the levels of int4, blocks of 64", 4.25, 64, _levels(LEVELS, is_signed=True)),
    ]
    return [*used, *tried]


def _error(weights: list[Tensor], block: int | None, rounds: Rounds) -> float:
    difference = total = 0.0
    for weight in weights:
        if block is not None:
            columns = weight.shape[1] // block * block
            weight = weight[:, :columns].reshape(-1, block)
        difference += float((rounds(weight) - weight).double().pow(2).sum())
        total += float(weight.double().pow(2).sum())
    return float((difference / total) ** 0.5)


def _packed(name: str) -> Rounds:
    format = FORMATS[name]
    return lambda w: unpack(*format.pack(w), format, w.shape, torch.float32)


def _scale(wanted: Tensor) -> Tensor:
    scale = wanted.bfloat16().float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _int8(blocks: Tensor) -> Tensor:
    scale = _scale(blocks.abs().amax(1, keepdim=True) / 127)
    return (blocks / scale).round().clamp(-127, 127) * scale


def _largest(blocks: Tensor) -> Tensor:
    """The largest element of each block, with its sign."""
    high, low = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    return torch.where(high >= -low, high, low)


def _levels(values: tuple[float, ...], *, is_signed: bool) -> Rounds:
    levels = torch.tensor(values)

    def rounds(blocks: Tensor) -> Tensor:
        largest = _largest(blocks) if is_signed else blocks.abs().amax(1, keepdim=True)
        scale = _scale(largest)
        return levels[torch.bucketize(blocks / scale, (levels[1:] + levels[:-1]) / 2)] * scale

    return rounds


def _affine(blocks: Tensor) -> Tensor:
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale, zero = _scale((high - low) / 15), low.bfloat16().float()
    return ((blocks - zero) / scale).round().clamp(0, 15) * scale + zero


def _integers(blocks: Tensor) -> Tensor:
    scale = _scale(_largest(blocks) / -8)
    return (blocks / scale).round().clamp(-8, 7) * scale


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def _heavy_tailed(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.distributions.StudentT(5.0).sample(torch.Size(shape)) * 0.02


if __name__ == "__main__":
    main()
