"""A small transformer learns from compact state as it does from an fp32 master and moments.

All start from the same weights, see the same text in the same order, and compute with the bf16
weight, so that the state is the only difference.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compact_states import CompactState
from torch import Tensor, nn

from outcore.kernels import AdamWScalars, adamw_, split_master

WIDTH, DEPTH, HEADS, LENGTH, BATCH = 128, 4, 4, 64, 16
NUM_STEPS, NUM_AVERAGED = 300, 100
SEEDS = (0, 1)
PEAK_LR, NUM_WARMUP, CLIP_NORM = 2e-3, 30, 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (len(x), LENGTH, HEADS, WIDTH // HEADS)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Of bytes; about 0.9 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(text) + self.places.weight)))


@functools.cache
def text() -> Tensor:
    """The sources of Python's standard library, as bytes."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    joined = bytearray(b"".join(path.read_bytes() for path in sources))
    return torch.frombuffer(joined, dtype=torch.uint8)


class ExactState:
    """The split fp32 master and fp32 moments: what the compact states are compared with."""

    def __init__(self, master: Tensor) -> None:
        self.weight, self.remainder = split_master(master)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)

    def step(self, grad: Tensor, scalars: AdamWScalars, *, seed: int, step: int) -> None:
        adamw_(**vars(self), grad=grad, scalars=scalars)


def scalars_of_step(step: int, norm: float) -> AdamWScalars:
    cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / NUM_STEPS))
    return AdamWScalars.of(
        lr=PEAK_LR * min(1.0, step / NUM_WARMUP) * cosine,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        step=step,
        grad_scale=min(1.0, CLIP_NORM / norm),
    )


def final_loss(kind: str, seed: int) -> float:
    """The mean loss of the last steps."""
    torch.manual_seed(seed)
    model = Transformer()
    parameters = list(model.parameters())
    start = nn.utils.parameters_to_vector(parameters).detach().bfloat16().float()
    state = ExactState(start) if kind == "exact" else CompactState.of(start, kind)
    losses = []
    for step in range(1, NUM_STEPS + 1):
        with torch.no_grad():
            nn.utils.vector_to_parameters(state.weight.float(), parameters)
        begins = torch.randint(0, len(text()) - LENGTH, (BATCH,))
        batch = torch.stack([text()[i : i + LENGTH + 1] for i in begins]).long()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        grad = nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters))
        state.step(grad, scalars_of_step(step, grad.norm().item()), seed=seed, step=step)
        losses.append(loss.item())
    return sum(losses[-NUM_AVERAGED:]) / NUM_AVERAGED


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("one_torch_thread")
def test_compact_states_train_as_well_as_fp32() -> None:
    means = {
        kind: sum(final_loss(kind, seed) for seed in SEEDS) / len(SEEDS)
        for kind in ("exact", "compact", "minimal")
    }
    assert means["exact"] < 2.8, "nothing was learnt, so nothing was compared"
    assert means["compact"] < 1.005 * means["exact"], means
    assert means["minimal"] < 1.015 * means["exact"], means
