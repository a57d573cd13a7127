"""A tiny training run that the tests of checkpoints save, stop, harm and resume."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import outcore
from outcore.checkpoint import run_state
from outcore.checkpoint.folder import CheckpointFolder

CONFIG: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
    "vocab_size": 61,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
PLACEMENTS: list[dict[str, Any]] = [
    {"weights": "host", "state": "host", "num_visits": 3},
    {"weights": "device", "state": "device"},
    {"weights": "device", "state": "host"},
    {"weights": "disk", "state": "disk"},
    {"weights": ["disk", "host", "device"], "state": ["disk", "host", "device"]},
]
ALL_PLACEMENTS = [
    *PLACEMENTS,
    {"weights": "host", "state": "host", "num_visits": 0},
    {"weights": "host", "state": "device"},
    {"weights": "device", "state": "host", "num_visits": 4},
    {"weights": "disk", "state": "host"},
    {"weights": "device", "state": "disk"},
]


class Run:
    """A tiny model with dropout, a schedule and data that is drawn as it goes."""

    def __init__(
        self, disk: Path, seed: int = 0, adamw: dict[str, Any] | None = None, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        model = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
        self.model = outcore.offload(model, device="cpu", disk=str(disk), **options)
        adamw = {"max_grad_norm": 1.0, **(adamw or {})}
        self.optimizer = outcore.AdamW(self.model, lr=1e-2, **adamw)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.losses: list[float] = []

    def step(self) -> None:
        ids = torch.randint(0, 41, (2, 8)) + random.randrange(10) + int(np.random.randint(10))
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(float(loss.detach()))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def tensors(self) -> dict[str, Tensor]:
        found = {n: t.clone() for n, t in self.model.state_dict().items()}
        state = self.optimizer.state_dict()["state"]
        found |= {f"{i}.{k}": v.clone() for i, e in state.items() for k, v in e.items()}
        return found

    def values(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict()["last_epoch"]}

    def save(self, folder: CheckpointFolder) -> Path:
        return run_state.save(folder, self.model, self.optimizer, self.values())

    def load(self, folder: CheckpointFolder) -> int | None:
        resumed = run_state.load(folder, self.model, self.optimizer)
        if resumed is None:
            return None
        self.schedule.last_epoch = resumed.values["schedule"]
        self.losses.clear()
        return resumed.step


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
