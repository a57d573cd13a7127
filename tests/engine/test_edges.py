"""Edges wait for their updates, whoever reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME
from transformers import DebertaV2ForMaskedLM

import outcore
from outcore.stream.lanes import injected_delays


def losses(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for step in range(5):
        ids = torch.randint(1, 90, (4, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_weight_that_a_parent_reads_directly_is_updated_before() -> None:
    def run(max_delay_s: float) -> list[float]:
        model = BY_NAME["deberta-v2"].make().train()
        assert isinstance(model, DebertaV2ForMaskedLM)
        model = outcore.offload(model, device="cpu")
        with injected_delays(max_delay_s, seed=1):
            found = losses(model, outcore.AdamW(model, lr=1e-2))
        outcore.release(model)
        return found

    assert run(0.0) == run(0.02)


def test_resizing_the_embedding_is_refused_until_release() -> None:
    model = outcore.offload(BY_NAME["llama"].make(), device="cpu")
    with pytest.raises(outcore.OutcoreError, match=r"resize before outcore\.offload"):
        model.resize_token_embeddings(200)
    outcore.release(model)
    assert model.resize_token_embeddings(200).num_embeddings == 200


def test_a_head_that_a_loss_multiplies_by_itself_is_updated_before() -> None:
    """As TRL's fused head does, in turns with forwards that call the head."""

    def run(max_delay_s: float) -> list[float]:
        model = outcore.offload(BY_NAME["llama"].make().train(), device="cpu")
        ordinary = model.forward

        def fused(input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool = False) -> Any:
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
            logits = hidden @ model.lm_head.weight.T
            return model.loss_function(logits, labels, vocab_size=logits.shape[-1])

        optimizer = outcore.AdamW(model, lr=1e-2)
        found = []
        with injected_delays(max_delay_s, seed=1):
            for step in range(6):
                ids = torch.randint(1, 90, (4, 16), generator=torch.Generator().manual_seed(step))
                model.forward = ordinary
                if step % 2:
                    with torch.no_grad():
                        found.append(model(input_ids=ids).logits.sum().item())
                model.forward = fused
                loss = model(input_ids=ids, labels=ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        outcore.release(model)
        return found

    assert run(0.0) == run(0.02)
