"""Models by their id on the Hub: from the cache when offline, and only files that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hub_cache import link_snapshot, offline_cache, put_snapshot, remembered_download
from huggingface_hub import constants, errors
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.model_directory import model_directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    return offline_cache(tmp_path / "hub", monkeypatch)


def put_model(cache: Path, name: str) -> LlamaForCausalLM:
    """Lay out a model as a download does: blobs, and a snapshot of links to them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=97,
        )
    )
    blobs = put_snapshot(cache, name)
    model.save_pretrained(blobs)
    link_snapshot(blobs)
    return model


def test_a_cached_model_is_loaded_offline(cache: Path) -> None:
    expected = put_model(cache, "some-org/a-model.v1")
    model = outcore.load("some-org/a-model.v1", device="cpu")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_adapters_of_a_model_of_the_hub_name_it_by_its_id(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after from_pretrained: the folder of this machine's cache is no name elsewhere."""
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # PEFT looks for the base's config when it saves
    put_model(cache, "some-org/a-model")
    adapters = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = outcore.load("some-org/a-model", adapters=adapters, device="cpu")
    model.save_pretrained(tmp_path / "adapters")
    saved = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "some-org/a-model"


def test_a_model_that_is_not_cached_is_named(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"some-org/another.*hub.*HF_HUB_OFFLINE is set"):
        outcore.load("some-org/another", device="cpu")


def test_a_path_is_never_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("asked the Hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/misspelt", "nothing", "/no/such/folder", "./a/b", "../a/b", "a/b/c"):
        assert model_directory(name) == Path(name)
        with pytest.raises(ValueError, match=r"no config\.json"):
            outcore.load(name, device="cpu")


def test_pickles_and_code_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = remembered_download(monkeypatch)
    assert model_directory("org/name") == Path("/somewhere")
    assert asked["name"] == "org/name"
    assert asked["local_files_only"] is False
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja",
        "pytorch_model.bin", "model.pt", "modeling_name.py", "original/consolidated.safetensors",
        "consolidated.safetensors", "onnx/config.json", "model.gguf",
    ]  # fmt: skip
    fetched = filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(fetched) == files[:7]


class Answer(Exception):
    """What the Hub's client raises; its own errors want a whole response."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errors.LocalEntryNotFoundError("Got: ConnectError"),
            r"not in the cache \(.*\), and the Hub",
        ),
        (
            type("Gated", (Answer, errors.GatedRepoError), {}),
            "ask for access at https://hugg.*org/",
        ),
        (type("Gone", (Answer, errors.RepositoryNotFoundError), {}), "it has no such model, or a"),
        (RuntimeError("proxy\nand more"), "Hub: proxy$"),
    ],
)
def test_what_the_hub_says_ends_in_a_remedy(
    error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error if isinstance(error, Exception) else error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=message):
        model_directory("org/name")
