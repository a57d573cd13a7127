"""Specs against real Hugging Face models of many families, and against arithmetic by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import link_snapshot, offline_cache, put_snapshot, remembered_download
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from outcore.adapters import with_adapters
from outcore.attention_spec import Attention
from outcore.blocks import find_parts
from outcore.model_spec import model_spec, model_without_values, spec_of_model
from outcore.shapes import shape_config, shape_dict
from outcore.store.spans import SpanLayout

sys.path.insert(0, str(Path(__file__).parent / "engine"))
from families import BY_NAME

TESTED = [
    "llama", "llama-tied", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3-moe", "gpt-oss",
    "deepseek-v3", "gpt2", "t5", "bert",
]  # fmt: skip
# Their products can be counted: no window that eager attention ignores, experts one by one.
COUNTED = ["llama", "llama-tied", "qwen2", "qwen3", "gpt2", "t5", "bert"]


def config_of(name: str) -> Any:
    config = BY_NAME[name].config()
    if name == "bert":
        config.architectures = ["BertForMaskedLM"]
    return config


@pytest.mark.parametrize("name", TESTED)
def test_blocks_and_edges_are_those_of_the_real_model(name: str) -> None:
    spec, model = model_spec(config_of(name)), BY_NAME[name].make()
    parts = find_parts(model)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert [b.name for b in spec.blocks] == [p.name for p in parts if p.is_block]
    assert [e.name for e in spec.edges] == [p.name for p in parts if not p.is_block]
    for part in parts:
        found: Any = next(x for x in (*spec.blocks, *spec.edges) if x.name == part.name)
        layout = SpanLayout.of(part.parameters)
        assert (found.numel, found.trainable_numel) == (layout.numel, layout.trainable_numel)
        assert found.parameters == sum(p.numel() for p in part.parameters.values())
    head = model.get_output_embeddings()
    assert spec.vocabulary == head.weight.shape[0]
    assert spec.is_tied == (head.weight is model.get_input_embeddings().weight)
    assert all(block.attention is not None for block in spec.blocks)
    assert all(block.kept_elements_per_token > 0 for block in spec.blocks)


@pytest.mark.parametrize("name", COUNTED)
def test_operations_are_those_that_run(name: str) -> None:
    family, spec = BY_NAME[name], model_spec(config_of(name))
    sequences, seq_len = 4, 16
    ids = torch.zeros((sequences, seq_len), dtype=torch.long)
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if family.is_seq2seq else {})
    model = family.make().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch)
    # Eager attention computes both halves of a causal one.
    attention = sum(
        (2.0 if block.attention.is_causal and not block.attention.crosses else 1.0)
        * block.attention_flops(seq_len)
        for block in spec.blocks
        if block.attention is not None
    )
    products = 2 * spec.active_parameters * sequences * seq_len
    expected = products + sequences * attention
    # Norms and biases are counted as products, and a decoder's own attention here at half.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.12)


def test_only_visited_experts_count_but_all_move() -> None:
    spec = model_spec("qwen3-30b-a3b")
    assert spec.is_moe
    block = spec.blocks[0]
    assert block.active_parameters < block.parameters / 7
    assert block.weight_bytes("bf16") == pytest.approx(2 * block.parameters, rel=1e-4)
    assert not model_spec("qwen3-8b").is_moe


def test_hybrid_models_have_blocks_of_several_kinds() -> None:
    dense_first = model_spec("deepseek-v3").blocks
    assert [b.active_parameters == b.parameters for b in dense_first[:5]] == [True] * 3 + [
        False
    ] * 2
    windows = [b.attention.window for b in model_spec("gemma-3-1b").blocks if b.attention]
    assert windows[:6] == [512] * 5 + [None]
    alternating = [b.attention.window for b in model_spec("gpt-oss-20b").blocks if b.attention]
    assert alternating[:4] == [128, None, 128, None]


@pytest.mark.parametrize("seq_len", [1, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 8, 64])
def test_pairs_against_counting(seq_len: int, window: int | None) -> None:
    attention = Attention(num_heads=1, key_width=1, value_width=1, is_causal=True, window=window)
    seen = sum(min(i + 1, window or seq_len) for i in range(seq_len))
    # The formula takes the diagonal at half.
    assert attention.pairs(seq_len) == pytest.approx(seen, abs=max(1, seq_len / 2))


def test_latent_attention_has_wider_keys_than_values() -> None:
    attention = model_spec("deepseek-v3").blocks[0].attention
    assert attention is not None
    assert (attention.key_width, attention.value_width) == (128 * 192, 128 * 128)


def test_a_directory_a_config_and_its_values_give_one_spec(tmp_path: Path) -> None:
    config = shape_config("qwen3-0.6b")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    by_config = model_spec(config)
    assert model_spec(tmp_path).blocks == by_config.blocks
    assert model_spec(str(tmp_path)).edges == by_config.edges
    assert model_spec(shape_dict("qwen3-0.6b")).blocks == by_config.blocks
    assert model_spec("qwen3-0.6b").num_parameters == by_config.num_parameters
    with pytest.raises(ValueError, match="neither a Hugging Face directory"):
        model_spec("no-such-model")


def test_frozen_parameters_are_not_trained() -> None:
    model = BY_NAME["llama"].make()
    for parameter in model.model.layers[0].mlp.parameters():
        parameter.requires_grad_(False)
    first, second = spec_of_model(model).blocks[:2]
    assert first.trainable_parameters < second.trainable_parameters
    assert first.parameters == second.parameters
    assert first.trainable_numel < second.trainable_numel
    spec = spec_of_model(model)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert spec.frozen_parameters == sum(parameter.numel() for parameter in frozen)
    assert spec.frozen_bytes(None) == pytest.approx(2 * spec.frozen_parameters, rel=0.02)
    assert spec_of_model(BY_NAME["llama"].make()).frozen_parameters == 0


def test_the_spec_is_what_the_engine_streams() -> None:
    """The engine's units, in their order, have the sizes that a plan counts with."""
    from outcore.engine.offload import resolve_options
    from outcore.engine.placement import build_units
    from outcore.optim.updates import chunks_of
    from outcore.planning.placement import Units
    from outcore.planning.plan import Job

    checked, _ = resolve_options(None, device="cpu")
    for name in TESTED:
        model = BY_NAME[name].make()
        built = build_units(model, checked)
        units = Units(spec_of_model(model), Job(tokens=8, seq_len=8))
        counted = units.units
        assert [u.layout.numel for u in built] == [u.numel for u in counted], name
        assert [u.layout.trainable_numel for u in built] == [u.trainable_numel for u in counted]
        numels = [c.numel for c in chunks_of(built, units._limit(), 1)]
        assert units.max_chunk == max(numels)
        urgent = [unit for unit in built if unit.is_urgent]
        first = [c.numel for c in chunks_of(urgent, units._limit(), 1)]
        assert [numel for _, numel in units.chunks] == first
        runs_whole = [u.arrives_whole and not u.part.is_block for u in built]
        edges = iter(spec_of_model(model).edges)
        assert runs_whole == [
            next(edges).runs_as_block if u.block is None else False for u in counted
        ]


def test_a_config_of_absurdly_many_layers_is_refused_at_once() -> None:
    config = shape_config("smollm2-135m", num_hidden_layers=10**9)
    with pytest.raises(ValueError, match="num_hidden_layers is 1,000,000,000"):
        model_spec(config)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return offline_cache(tmp_path / "hub", monkeypatch)


def test_a_cached_config_of_the_hub_is_enough(cache: Path) -> None:
    blobs = put_snapshot(cache, "some-org/Small-7B.v1")
    (blobs / "config.json").write_text(json.dumps(shape_dict("smollm2-135m")))
    link_snapshot(blobs)
    spec = model_spec("some-org/Small-7B.v1")
    assert spec.name == "some-org/Small-7B.v1"
    assert spec.blocks == model_spec("smollm2-135m").blocks


def test_of_the_hub_nothing_but_the_config_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = remembered_download(monkeypatch)
    with pytest.raises(ValueError, match=r"org/name on the Hugging Face Hub has no config\.json"):
        model_spec("org/name")
    assert (asked["name"], asked["allow_patterns"]) == ("org/name", ["config.json"])
    assert asked["local_files_only"] is False


def test_an_id_that_is_not_cached_names_a_shape_that_is_like_it(cache: Path) -> None:
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set") as error:
        model_spec("Qwen/Qwen2.5-7B-Instruct")
    assert "The shape qwen2.5-7b needs no download" in str(error.value)


def test_code_beside_a_config_of_the_hub_is_not_run(cache: Path, tmp_path: Path) -> None:
    blobs = put_snapshot(cache, "some-org/own-code")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnConfig: pass\n"
    (blobs / "configuration_own.py").write_text(code)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (blobs / "config.json").write_text(json.dumps(config))
    link_snapshot(blobs)
    with pytest.raises(OSError, match=r"config\.json: cannot be used"):
        model_spec("some-org/own-code")
    assert not (tmp_path / "ran").exists()


def test_a_directory_without_a_config_is_no_misspelt_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json: it is no Hugging Face model"):
        model_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -64}, r"makes no model \(.*negative dimension -64"),
        (
            {"hidden_size": "big"},
            "Validation error for field 'hidden_size': .*expected int, got str|unsupported operand",
        ),
        pytest.param(
            {"hidden_size": 65, "num_attention_heads": 8},
            r"hidden size \(65\) is not a multiple",
            marks=pytest.mark.skipif(
                not hasattr(LlamaConfig, "validate_architecture"),
                reason="this transformers does not look at sizes",
            ),
        ),
    ],
)
def test_a_config_that_makes_no_model_says_what_is_wrong(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = {"model_type": "llama", "num_hidden_layers": 2, **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises((ValueError, OSError), match=message):
        model_spec(tmp_path)


def test_the_longest_sequence_is_known_where_the_config_has_it() -> None:
    assert model_spec("smollm2-135m").longest_sequence == 8192
    assert model_spec(BY_NAME["t5"].config()).longest_sequence is None


def test_a_spec_with_adapters_takes_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DeepSeek-V3 those of rank 16 are 28 GiB; yet the numbers are those of real ones."""
    peft = pytest.importorskip("peft")
    seen: list[Any] = []

    def watched(model: Any, *, name: str | None = None) -> Any:
        seen.append(model)
        return spec_of_model(model, name=name)

    monkeypatch.setattr("outcore.model_spec.spec_of_model", watched)
    for name in ("llama", "mixtral"):
        config = config_of(name)
        config.architectures = None
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        spec = model_spec(config, adapters=adapters)
        assert all(parameter.is_meta for parameter in seen[-1].parameters())
        real = with_adapters(model_without_values(config, name), adapters)
        assert not any(p.is_meta for n, p in real.named_parameters() if "lora_" in n)
        assert spec_of_model(real, name=spec.name) == spec


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_that_of_the_current_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape_config("smollm2-135m").to_dict()))
    monkeypatch.chdir(tmp_path)
    assert model_spec(".").name == tmp_path.name
    with pytest.raises(ValueError, match="an empty name: write that of a directory"):
        model_spec(name)
