"""Tables whose first axis happens to be as long as the batch are not split with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from families import VOCAB, Family, batch_of
from torch import Tensor
from training import assert_same_gradients

from outcore.passes.micro_batch import MicroBatches


def _deberta() -> Any:
    return hf.DebertaV2Config(  # tables of (2 x 4, hidden)
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=4,
        position_buckets=4,
    )


def _mpt() -> Any:
    return hf.MptConfig(  # a table of (heads, 1, max_seq_len)
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=32
    )


@pytest.mark.parametrize(
    ("family", "sequences"),
    [
        (Family(name="deberta", config=_deberta, auto=hf.AutoModelForMaskedLM), 8),
        (Family(name="mpt", config=_mpt), 4),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_gradients_equal_plain_torch(family: Family, sequences: int) -> None:
    batch = batch_of(family, sequences=sequences, seq_len=9)
    assert_same_gradients(lambda model: model(**batch).loss, family)


@pytest.mark.parametrize(
    ("leaf", "is_split"),
    [
        (torch.ones(4, 9), True),  # a mask
        (torch.ones(4, 7, dtype=torch.int64), True),  # an encoder's mask
        (torch.ones(4, 7, 32), True),  # an encoder's states
        (torch.ones(4, 9, 8), True),  # rotary tables of each sequence
        (torch.ones(4, 1, 9, 9), True),
        (torch.ones(4, 32), False),
        (torch.ones(4, 1, 32), False),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else str(value),
)
def test_which_shapes_carry_the_batch(leaf: Tensor, is_split: bool) -> None:
    assert MicroBatches([torch.ones(4, 9, 32), leaf], 2).is_split is is_split
