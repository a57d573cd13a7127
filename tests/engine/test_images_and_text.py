"""Models of several: a tower that sees images, and a language model; each has rules of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import outcore

IMAGE = 302  # the token that stands for a part of an image
TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llava": lambda: hf.LlavaConfig(
        text_config=hf.LlamaConfig(**TEXT),
        vision_config=hf.CLIPVisionConfig(**TOWER),
        image_token_index=IMAGE,
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config={**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        boi_token_index=300,
        eoi_token_index=301,
        image_token_index=IMAGE,
    ),
}


def batch_of(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 290, (4, 16), generator=generator)
    ids[:, 2:6] = IMAGE
    batch = {
        "input_ids": ids,
        "labels": torch.where(ids == IMAGE, -100, ids),
        "pixel_values": torch.randn(4, 3, 28, 28, generator=generator),
    }
    return batch if name == "llava" else {**batch, "token_type_ids": (ids == IMAGE).long()}


@pytest.fixture(params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Any]:
    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(CONFIGS[request.param]())
    model.save_pretrained(tmp_path)
    return request.param, tmp_path, model.train()


def test_a_directory_is_loaded_with_the_positions_of_its_tower(
    saved: tuple[str, Path, Any],
) -> None:
    name, directory, plain = saved
    model = outcore.load(directory, device="cpu").train()
    buffers = dict(model.named_buffers())
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    optimizer = outcore.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    batch = batch_of(name)
    theirs, ours = (m(**batch).loss for m in (plain, model))
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    theirs.backward()
    ours.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-4)
    outcore.release(model)


def test_a_new_model_has_the_values_that_the_rules_of_its_parts_give(
    saved: tuple[str, Path, Any],
) -> None:
    _, _, plain = saved
    model = outcore.from_config(plain.config, device="cpu")
    buffers = dict(model.named_buffers())
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    spread = {key: float(p.detach().std()) for key, p in model.named_parameters() if p.ndim > 1}
    for key, parameter in plain.named_parameters():
        if parameter.ndim > 1 and parameter.numel() > 500:
            assert spread[key] == pytest.approx(float(parameter.detach().std()), rel=0.3), key
    outcore.release(model)


def test_a_directory_is_planned_with_the_blocks_of_both(saved: tuple[str, Path, Any]) -> None:
    _, directory, _ = saved
    plan = outcore.plan(directory, machine="rtx-4090", tokens=64, seq_len=16)
    assert len(plan.blocks) == 2 + 3
