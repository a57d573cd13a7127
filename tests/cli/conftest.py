from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(autouse=True)
def _tiny_models(one_torch_thread: None, closed_engines: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no message is wrapped, and none is coloured."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    monkeypatch.setenv("NO_COLOR", "1")
    # Where CI is recognised, typer forces a terminal, whose codes would split the messages.
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as `save_pretrained` leaves it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    directory = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
