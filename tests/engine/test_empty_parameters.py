"""Parameters without elements, wherever a model has them: the rest trains as if they were not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder


def empty() -> nn.Parameter:
    return nn.Parameter(torch.zeros(0, 3))


class Block(nn.Module):
    def __init__(self, has_empty: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.empty = empty() if has_empty else None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.linear(hidden)
        return hidden if self.empty is None else hidden + self.empty.sum()


class Head(nn.Module):
    """``first``: the empty one has the place of the weight behind it."""

    def __init__(self, first: bool, alone: bool) -> None:
        super().__init__()
        self.first = empty() if first else None
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.bias = nn.Parameter(torch.ones(16))
        self.alone = Alone() if alone else None

    def forward(self, hidden: Tensor) -> Tensor:
        out = hidden @ self.weight + self.bias
        out = out if self.first is None else out + self.first.sum()
        return out if self.alone is None else self.alone(out)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = empty()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.empty.sum()


class Model(nn.Module):
    def __init__(self, where: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(where in ("block", "frozen")) for _ in range(3))
        self.head = Head(where == "first", where == "alone")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise if parameter.dim() == 1 else noise / 4)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


def train(model: Any, optimizer: outcore.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def offloaded(where: str | None, frozen: bool, passing: bool) -> tuple[Any, outcore.AdamW]:
    model = Model(where)
    if frozen:
        model.blocks[1].linear.requires_grad_(False)
    model = outcore.offload(model, device="cpu")
    return model, outcore.AdamW(model, lr=1e-2, update_during_backward=passing)


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("where", ["block", "frozen", "first", "alone"])
def test_an_empty_parameter_changes_nothing(tmp_path: Path, where: str, passing: bool) -> None:
    expected = train(*offloaded(None, where == "frozen", passing), range(4))
    model, optimizer = offloaded(where, where == "frozen", passing)
    assert train(model, optimizer, range(2)) == expected[:2]
    optimizer.load_state_dict(optimizer.state_dict())
    folder = CheckpointFolder(tmp_path / "checkpoints")
    run_state.save(folder, model, optimizer, {})
    model, optimizer = offloaded(where, where == "frozen", passing)
    assert run_state.load(folder, model, optimizer) is not None
    assert train(model, optimizer, range(2, 4)) == expected[2:]
