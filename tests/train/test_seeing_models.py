"""A model that sees images, trained with texts: its language part learns, the rest stays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tokenizers_made_here import CHATML, make_tokenizer
from train_files import Files
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from outcore.train.display import Display
from outcore.train.run import train

PROCESSOR = {"do_resize": True, "image_mean": [0.5, 0.5, 0.5]}


@pytest.fixture
def seeing(files: Files) -> Files:
    """A directory as those of Gemma 3 from 4B on are."""
    tokenizer = make_tokenizer(CHATML)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {
        "vocab_size": len(tokenizer) + 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 16,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    tower = {"num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config={**size, **text},
        vision_config={**size, **tower},
        mm_tokens_per_image=4,
        image_token_index=len(tokenizer),
        boi_token_index=len(tokenizer) + 1,
        eoi_token_index=len(tokenizer) + 1,
    )
    torch.manual_seed(0)
    folder = files.folder / "seeing"
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text(" " * (2 << 20))  # too large to be one
    return replace(files, model=folder)


def test_its_language_part_learns_and_its_tower_stays(seeing: Files) -> None:
    settings = seeing.settings(max_steps=3)
    assert train(settings, Display(Console(quiet=True))).is_complete
    before = Gemma3ForConditionalGeneration.from_pretrained(seeing.model).state_dict()
    after = Gemma3ForConditionalGeneration.from_pretrained(settings.output).state_dict()
    stays = {name for name in before if torch.equal(before[name], after[name])}
    of_images = {name for name in before if "vision" in name or "multi_modal" in name}
    assert stays == of_images


def test_it_still_knows_how_images_are_prepared(seeing: Files) -> None:
    settings = seeing.settings(max_steps=1)
    train(settings, Display(Console(quiet=True)))
    output = seeing.folder / "out"
    assert json.loads((output / "preprocessor_config.json").read_text()) == PROCESSOR
    assert not (output / "processor_config.json").exists()
