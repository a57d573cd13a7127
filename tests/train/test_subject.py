"""What a run is planned for."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handmade_plans import GIB, make_machine
from hub_cache import link_snapshot, offline_cache, put_snapshot
from rich.console import Console
from train_files import Files
from transformers import AutoConfig

import outcore
from outcore.errors import DoesNotFit
from outcore.shapes import shape_config
from outcore.train import subject
from outcore.train.display import Display
from outcore.train.run import train
from outcore.train.settings import TrainSettings

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_disk_that_was_named_is_the_one_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path | None] = []

    def here(*, disk: Path | None, progress: Any) -> Any:
        asked.append(disk)
        return make_machine(device_name="CPU", name="here", is_unified=True)

    monkeypatch.setattr(subject, "here", here)
    for disk in (f"{tmp_path}:10GiB", None):
        settings = TrainSettings(model="m", data=("d",), output="o", seq_len=128, disk=disk)
        subject.plan_for(settings, 1, shape_config("smollm2-135m"))
    assert asked == [tmp_path, None]


def test_a_disk_that_is_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_machine(device_name="CPU", name="here", is_unified=True, disk_read_bytes_s=0.0)
    monkeypatch.setattr(subject, "here", lambda **_: machine)
    settings = TrainSettings(
        model="m", data=("d",), output="o", seq_len=128, disk="/dev/shm:1GiB", device="cpu"
    )
    with pytest.raises(ValueError, match="disk /dev/shm is memory, or here has no disk"):
        subject.plan_for(settings, 1, shape_config("smollm2-135m"))


def test_the_memory_of_a_cpu_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 billion parameters take 24 GiB in fp32: in halves they would fit twice 22."""
    machine = make_machine(
        device_name="CPU",
        name="here",
        is_unified=True,
        device_memory_bytes=22 * GIB,
        host_memory_bytes=22 * GIB,
    )
    monkeypatch.setattr(subject, "here", lambda **_: machine)
    for device_memory in (None, "10GiB"):
        settings = TrainSettings(
            model="m",
            data=("d",),
            output="o",
            seq_len=512,
            device="cpu",
            device_memory=device_memory,
        )
        with pytest.raises(DoesNotFit):
            subject.plan_for(settings, 2, shape_config("qwen2.5-1.5b"))
        plan = subject.plan_for(settings, 2, shape_config("qwen2.5-0.5b"))
        assert plan.tier_bytes("device") + plan.tier_bytes("host") < 22 * GIB
        assert (plan.tier_bytes("host") == 0) == (device_memory is None)


@pytest.mark.parametrize("targets", [("q_proj", "v_porj"), ("v_porj",), ("input_layernorm",)])
def test_a_target_that_gets_no_adapter_is_refused_before_anything_is_written(
    files: Files, targets: tuple[str, ...]
) -> None:
    pytest.importorskip("peft", reason="needs peft")
    settings = files.settings(lora=True, lora_targets=targets)
    with pytest.raises(ValueError, match=r"lora_targets.* layers are down_proj, .*, v_proj"):
        train(settings, Display(Console(quiet=True)))
    assert not Path(settings.output).exists()


@pytest.mark.parametrize(
    "targets", [("model.layers.1.self_attn.q_proj", "lm_head"), ("mlp.up_proj",)]
)
def test_targets_may_be_parts_of_names(files: Files, targets: tuple[str, ...]) -> None:
    pytest.importorskip("peft", reason="needs peft")
    settings = files.settings(lora=True, lora_targets=targets)
    subject.check_targets(settings, subject.config_of(settings))


def test_experts_that_are_one_tensor_may_be_targets_by_their_old_names() -> None:
    pytest.importorskip("peft", reason="needs peft")
    settings = TrainSettings(
        model="m", data=("d",), output="o", lora=True, lora_targets=("q_proj", "w1", "w2", "w3")
    )
    subject.check_targets(settings, shape_config("mixtral-8x7b"))


def test_dropout_before_experts_that_are_one_tensor_is_refused() -> None:
    pytest.importorskip("peft", reason="needs peft")
    settings = TrainSettings(
        model="m", data=("d",), output="o", lora=True, lora_dropout=0.05, seq_len=64
    )
    experts, dense = shape_config("mixtral-8x7b"), shape_config("smollm2-135m")
    with pytest.raises(ValueError, match=r"lora_dropout=0.05.*\(down_proj, .*k_proj, o_proj"):
        subject.check_dropout(settings, experts)
    subject.check_dropout(settings, dense)
    subject.check_dropout(replace(settings, lora_dropout=0.0), experts)
    subject.check_dropout(replace(settings, lora_targets=("q_proj",)), experts)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (AutoConfig.for_model("bert", architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (AutoConfig.for_model("t5", architectures=["T5ForConditionalGeneration"]), "T5For"),
        (
            AutoConfig.for_model("llama", architectures=["LlamaForSequenceClassification"]),
            "LlamaForSequenceClassification",
        ),
    ],
    ids=["masked", "encoder and decoder", "classifier"],
)
def test_what_predicts_no_next_token_is_refused_before_anything_is_written(
    files: Files, config: Any, what: str
) -> None:
    config.save_pretrained(files.folder / "other")
    settings = files.settings(model=str(files.folder / "other"))
    with pytest.raises(ValueError, match=f"is a {what}.* no causal language model"):
        train(settings, Display(Console(quiet=True)))
    assert not Path(settings.output).exists()


@pytest.mark.parametrize(
    ("model_type", "is_table"),
    [("gpt2", True), ("opt", True), ("gptj", True), ("llama", False), ("xglm", False)],
)
def test_sequences_that_end_behind_a_table_of_positions_are_refused(
    model_type: str, is_table: bool
) -> None:
    config = AutoConfig.for_model(model_type, max_position_embeddings=64, vocab_size=64)
    settings = TrainSettings(model="m", data=("d",), output="o", seq_len=65, tokens_per_step=65)
    refusal = pytest.raises(ValueError, match=r"seq_len=65, .* has 64 positions: --seq-len 64 is")
    with refusal if is_table else contextlib.nullcontext():
        subject.check_positions(settings, config, 64)
    subject.check_positions(replace(settings, seq_len=64), config, 64)


def test_adapters_are_no_model_to_begin_with(files: Files) -> None:
    (files.folder / "adapters").mkdir()
    (files.folder / "adapters" / "adapter_config.json").write_text("{}")
    settings = files.settings(model=str(files.folder / "adapters"))
    with pytest.raises(ValueError, match="holds adapters without the model"):
        train(settings, Display(Console(quiet=True)))


def test_adapters_of_a_model_of_the_hub_name_it_by_its_id(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # PEFT looks for the base's config when it saves
    blobs = put_snapshot(offline_cache(files.folder / "hub", monkeypatch), "some-org/a-model")
    shutil.copytree(files.model, blobs, dirs_exist_ok=True)
    link_snapshot(blobs)
    settings = files.settings(model="some-org/a-model", lora=True, max_steps=1)
    train(settings, Display(Console(quiet=True)))
    saved = json.loads((files.folder / "out" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "some-org/a-model"


@pytest.mark.parametrize(
    ("config", "undecayed"),
    [
        (
            AutoConfig.for_model(
                "gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=8, **TINY
            ),
            {"gate_up_proj_bias", "down_proj_bias"},
        ),
        (AutoConfig.for_model("cohere", use_qk_norm=True, **TINY), {"q_norm", "k_norm"}),
    ],
    ids=["biases of stacked experts", "norms of heads"],
)
def test_norms_and_biases_of_two_axes_are_not_decayed(config: Any, undecayed: set[str]) -> None:
    model = outcore.from_config(config, device="cpu")
    settings = TrainSettings(model="m", data=("d",), output="o", weight_decay=0.1)
    groups = subject.make_optimizer(model, settings).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    of_two_axes = [(name, decay[id(p)]) for name, p in model.named_parameters() if p.dim() >= 2]
    spared = {name.removesuffix(".weight").rpartition(".")[2] for name, d in of_two_axes if not d}
    assert spared == undecayed
