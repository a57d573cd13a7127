"""All of a model and its optimizer as tensors, to compare bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import outcore


def everything(model: Any, optimizer: outcore.AdamW) -> dict[str, Tensor]:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": tensor.clone() for name, tensor in entry.items()}
    return tensors


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
