"""What packing promises, asked of a model: documents in one sequence do not see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers_made_here import CHATML, chat, make_tokenizer, write_jsonl
from transformers import LlamaConfig, LlamaForCausalLM

from outcore.data.batches import Batches, BatchOptions


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.usefixtures("one_torch_thread")
def test_the_loss_of_packed_documents_is_that_of_each_alone(
    tmp_path: Path, make_cache: Any, model: Any
) -> None:
    rows = [{"messages": chat("hi " * (n % 4), f"the cat {n}")} for n in range(12)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    cache = make_cache(path, using=make_tokenizer(CHATML))

    def total_loss(packing: bool) -> tuple[float, int, int]:
        options = BatchOptions(batch_size=2, seq_len=96, packing=packing, num_epochs=1)
        loss, num_labels, num_rows = 0.0, 0, 0
        with Batches(cache, options) as batches:
            for batch in batches:
                labels = int((batch["labels"][:, 1:] != -100).sum())
                with torch.no_grad():
                    loss += model(**batch, use_cache=False).loss.item() * labels
                num_labels += labels
                num_rows += len(batch["labels"])
        return loss, num_labels, num_rows

    packed, num_packed, num_sequences = total_loss(True)
    alone, num_alone, num_documents = total_loss(False)
    assert (num_documents, num_packed) == (12, num_alone)
    assert num_sequences <= 6
    assert packed == pytest.approx(alone, rel=1e-5)
