"""``outcore.load``: what it reads and refuses, and the master that it starts from."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reads_of_files import counted_reads, failing_reads
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import outcore
from outcore.engine import placement
from outcore.errors import StoreError
from outcore.store.host_arena import HostArena
from outcore.weights import file_ranges
from outcore.weights.checkpoint_files import CheckpointFiles, Wanted

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=97,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, name: str, dtype: torch.dtype) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantized_tensor_is_refused_by_name(directory: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(directory, name, dtype)
    with pytest.raises(outcore.StoreError, match=f"{name}.*Dequantize"):
        outcore.load(directory, device="cpu")


def test_a_quantized_config_is_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(outcore.UnsupportedModel, match="fp8"):
        outcore.load(directory, device="cpu")


def test_a_file_that_is_cut_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(outcore.StoreError, match=r"model\.safetensors"):
        outcore.load(directory, device="cpu")


def test_pages_of_every_home_on_the_host_are_made_and_pinned_with_the_others(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HostArena] = []

    @contextlib.contextmanager
    def making(arenas: Sequence[HostArena], *, pin: bool) -> Iterator[None]:
        made.extend(arenas)
        yield

    monkeypatch.setattr(placement, "made_ahead", making)
    homes = ["host", "device", "host"]
    model = outcore.load(directory, device="cpu", weights=homes, device_memory="5MB")
    units = outcore.engine_of(model).units
    on_host = [u.home.untyped_storage() for u in units if u.weights_home == "host"]
    assert len(on_host) >= 2
    assert {arena.span(0, torch.uint8).untyped_storage().data_ptr() for arena in made} == {
        storage.data_ptr() for storage in on_host
    }


def test_an_fp32_checkpoint_starts_from_its_fp32_master(directory: Path) -> None:
    loaded = outcore.load(directory, device="cpu", dtype=torch.bfloat16)
    whole = outcore.offload(
        LlamaForCausalLM.from_pretrained(directory), device="cpu", dtype=torch.bfloat16
    )
    found = [outcore.engine_of(model).units for model in (loaded, whole)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.remainder is not None
        assert theirs.remainder is not None
        assert torch.equal(ours.remainder, theirs.remainder), ours.name
        assert ours.remainder.any() or "norm" in ours.name


STORED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HOMES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 on the device": {"dtype": torch.bfloat16, "weights": "device"},
    "24 bits": {"dtype": torch.bfloat16, "state_format": "compact"},
    "no master": {"dtype": torch.bfloat16, "state_format": "minimal"},
    "int8": {"dtype": torch.bfloat16, "frozen_weights": "int8"},
    "int4": {"dtype": torch.bfloat16, "frozen_weights": "int4"},
    "disk": {"dtype": torch.bfloat16, "weights": "disk", "state": "disk"},
    "disk and host": {"dtype": torch.bfloat16, "weights": ["disk", "host", "disk"]},
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_homes_have_the_same_bits_as_those_of_a_whole_model(
    tmp_path: Path, dtype: torch.dtype, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards, with windows so small that tensors lie in several."""
    monkeypatch.setattr(file_ranges, "WINDOW_BYTES", 4096)
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIG.to_dict(), "hidden_size": 96, "tie_word_embeddings": True})
    LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path / "model", max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    options = {"device": "cpu", **HOMES[home]}
    if "disk" in home:
        options["disk"] = str(tmp_path)
    loaded = outcore.load(tmp_path / "model", **options)
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    whole.requires_grad_("frozen_weights" not in options)
    outcore.offload(whole, **options)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    units = [outcore.engine_of(model).units for model in (loaded, whole)]
    for ours, theirs in zip(*units, strict=True):
        assert torch.equal(ours.home.view(torch.uint8), theirs.home.view(torch.uint8)), ours.name
        assert (ours.remainder is None) == (theirs.remainder is None)
        if ours.remainder is not None:
            assert theirs.remainder is not None
            assert torch.equal(ours.remainder, theirs.remainder), ours.name
    for model in (loaded, whole):
        outcore.release(model)


def test_every_byte_is_read_about_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are sorted by name, models are not: read in a model's order, most is read again."""
    monkeypatch.setattr(file_ranges, "WINDOW_BYTES", 16384)
    counts = counted_reads(monkeypatch)
    outcore.load(directory, device="cpu")
    size = (directory / "model.safetensors").stat().st_size
    assert size * 0.9 < sum(counts) < size * 1.5


def test_an_error_of_the_disk_names_the_file_and_leaves_no_thread(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    failing_reads(monkeypatch)
    with pytest.raises(outcore.StoreError, match=r"model\.safetensors.*Input/output error"):
        outcore.load(directory, device="cpu")
    assert set(threading.enumerate()) == before


def test_a_file_that_is_cut_after_its_header_was_read(directory: Path) -> None:
    path = directory / "model.safetensors"
    files = CheckpointFiles(directory)
    os.truncate(path, path.stat().st_size - 5000)
    names = load_names(path)
    wanted = [Wanted(name=n, put=lambda *_: None, run_numel=1, owner=n) for n in names]
    with pytest.raises(outcore.StoreError, match=r"model\.safetensors ends at byte"):
        list(files.read(wanted, pin=False))


def load_names(path: Path) -> list[str]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def test_values_at_an_offset_that_their_type_cannot_have(tmp_path: Path) -> None:
    """The format lets a header end anywhere; the library writes it aligned."""
    values = torch.randn(3000)
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [3000], "data_offsets": [0, 12000]}}
    ).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length
    body = values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    found = torch.zeros(3000)

    def put(run: torch.Tensor, first: int) -> None:
        found[first : first + run.numel()] = run

    wanted = Wanted(name="a", put=put, run_numel=1, owner="a")
    assert list(CheckpointFiles(tmp_path).read([wanted], pin=False)) == ["a"]
    assert torch.equal(found, values)


def test_rotary_frequencies_in_the_file_are_not_read(directory: Path) -> None:
    """As transformers does: they follow from the config, and old files hold them rounded."""
    path = directory / "model.safetensors"
    rounded = {"model.rotary_emb.inv_freq": torch.full((4,), 0.5, dtype=torch.bfloat16)}
    save_file({**load_file(path), **rounded}, path, metadata={"format": "pt"})
    expected = LlamaForCausalLM.from_pretrained(directory).model.rotary_emb.inv_freq
    assert torch.equal(outcore.load(directory, device="cpu").model.rotary_emb.inv_freq, expected)


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.register_buffer("bias", torch.zeros(4))
    for values in (torch.arange(4.0), torch.ones(1)):
        save_file({"bias": values}, tmp_path / "model.safetensors")
        files = CheckpointFiles(tmp_path)
        if len(values) == 4:
            files.load_buffers(module)
        else:
            with pytest.raises(outcore.StoreError, match=r"bias has shape \[1\]"):
                files.load_buffers(module)
        assert torch.equal(module.bias, torch.arange(4.0))


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 5}, {"model_type": "qwen3"}])
def test_a_config_that_describes_more_than_the_files_hold_is_refused(
    directory: Path, changes: dict[str, object]
) -> None:
    """Transformers would draw the rest, and a run would train random values without a word."""
    config = directory / "config.json"
    values = {**json.loads(config.read_text()), **changes}
    if "model_type" in changes:
        values["architectures"] = ["Qwen3ForCausalLM"]
    config.write_text(json.dumps(values))
    with pytest.raises(StoreError, match=r"no weights for model\.layers\."):
        outcore.load(directory, device="cpu")


def test_a_new_head_is_told(directory: Path) -> None:
    with pytest.warns(UserWarning, match=r"no weights for score\.weight: .* random"):
        model = outcore.load(directory, device="cpu", auto_class=AutoModelForSequenceClassification)
    outcore.release(model)


def test_a_model_that_names_no_embedding_is_loaded_all_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names_none(self: LlamaForSequenceClassification) -> None:
        raise NotImplementedError

    monkeypatch.setattr(LlamaForSequenceClassification, "get_input_embeddings", names_none)
    with pytest.warns(UserWarning, match="no weights for score"):
        model = outcore.load(directory, device="cpu", auto_class=AutoModelForSequenceClassification)
    outcore.release(model)


@pytest.mark.parametrize("is_other", [False, True])
def test_a_head_that_is_the_embedding_by_the_config_and_another_in_the_files(
    tmp_path: Path, is_other: bool
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if is_other:
        tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()["lm_head.weight"]
    if is_other:  # transformers has two parameters then
        assert not torch.equal(expected, tensors["model.embed_tokens.weight"])
        with pytest.raises(StoreError, match=r"lm_head\.weight is .* different values"):
            outcore.load(tmp_path, device="cpu")
    else:
        model = outcore.load(tmp_path, device="cpu")
        assert torch.equal(model.state_dict()["lm_head.weight"], expected)
