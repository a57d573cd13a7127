"""Each installed peer trains a small model on the device."""

import importlib.util
import math

import pytest
import torch

from outcore.bench.job import BenchJob, BenchResult
from outcore.bench.peers import peer_names
from outcore.bench.peers.runner import run_peer
from outcore.shapes import shape_dict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIBRARY = {"native": "torch"}
VOCABULARY = 1000


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("name", peer_names())
def test_peer_learns_a_batch(name: str, micro_batch: int | None) -> None:
    library = LIBRARY.get(name, name)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    config = shape_dict(
        "qwen2.5-3b",
        tie_word_embeddings=False,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    job = BenchJob(config=config, sequences=4, seq_len=256, lr=1e-3, micro_batch=micro_batch)
    row = run_peer(name, job)
    assert isinstance(row, BenchResult), row
    assert row.device_peak_bytes > 0
    # What knowing nothing costs; the batch is the same in all eight steps.
    assert row.loss < math.log(VOCABULARY) - 0.1
