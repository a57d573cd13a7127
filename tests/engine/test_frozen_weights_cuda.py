"""On a CUDA device, in bf16 and compiled: a packed base has the same bits in every placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

import lora

import outcore
from outcore.kernels.packed_format import FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
PLACEMENTS: list[dict[str, Any]] = [
    {"weights": "device"},
    {"num_slots": 1, "activations": "keep"},
    {"activations": "offload"},
    {"weights": ["device", "host", "disk", "host"]},
]


def _trained(disk: Path, format: str, **options: Any) -> tuple[list[float], dict[str, Any]]:
    options.setdefault("weights", "host")
    model = outcore.offload(
        lora.plain_model(**SIZES),
        device="cuda",
        disk=str(disk),
        frozen_weights=format,
        micro_batch=2,
        **options,
    )
    optimizer = outcore.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    losses = []
    for seed in range(3):
        batch = {name: tensor.cuda() for name, tensor in lora.batch(seed).items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    adapters = {n: t.cpu().clone() for n, t in model.state_dict().items() if "lora_" in n}
    outcore.release(model)
    return losses, adapters


@pytest.mark.parametrize("format", FORMATS)
def test_every_placement_has_the_same_bits(format: str, tmp_path: Path) -> None:
    losses, adapters = _trained(tmp_path, format)
    for placement in PLACEMENTS:
        other_losses, other_adapters = _trained(tmp_path, format, **placement)
        assert other_losses == losses, placement
        for name, tensor in adapters.items():
            assert torch.equal(other_adapters[name], tensor), (placement, name)


@pytest.mark.parametrize("format", FORMATS)
def test_it_computes_what_the_host_expands(format: str) -> None:
    """The state_dict, expanded by torch on the host, is what the device computes with."""
    model = outcore.offload(
        lora.plain_model(**SIZES), device="cuda", weights="host", frozen_weights=format
    )
    batch = {name: tensor.cuda() for name, tensor in lora.batch().items()}
    with torch.no_grad():
        ours = model(**batch).logits.cpu()
    outcore.release(model)  # expands on the host
    plain = outcore.offload(model, device="cuda", weights="host")
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits.cpu(), ours)
