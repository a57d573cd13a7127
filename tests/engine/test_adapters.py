"""Models born offloaded with LoRA adapters, over a base in 8 or 4 bit or as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

import lora
import transformers as hf

import outcore
from outcore.adapters import with_adapters, with_adapters_on_meta
from outcore.engine.offload import engine_of
from outcore.model_spec import model_spec

MIXTRAL = hf.MixtralConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
frozen = pytest.mark.parametrize("frozen_weights", [None, "int8", "int4"])


@frozen
def test_a_checkpoint_with_adapters_is_the_model_that_peft_makes(
    frozen_weights: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(lora.config()).save_pretrained(tmp_path)
    model = outcore.load(
        tmp_path, adapters=lora.lora(), device="cpu", frozen_weights=frozen_weights
    )
    lora.moved_adapters(model)
    plain = lora.offloaded(lora.plain_model(), frozen_weights)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].float(), tensor.float()), name
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in plain.named_parameters() if p.requires_grad
    }
    losses, _ = lora.trained(model.train(), seeds=[0] * 4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_checkpoint_of_other_names_gets_adapters_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_converted: bool
) -> None:
    if is_converted:  # by transformers, as where values have to change
        monkeypatch.setattr("outcore.engine.create.stored_layout", lambda *_: None)
    hf.AutoModelForCausalLM.from_config(MIXTRAL).save_pretrained(tmp_path)  # experts one by one
    adapters = lora.lora(target_modules=["q_proj", "v_proj"])
    model = outcore.load(tmp_path, adapters=adapters, device="cpu", frozen_weights="int4")
    packed = [unit.packed for unit in engine_of(model).units if unit.packed is not None]
    assert len(packed) == 2
    assert any(len(field.shape) == 3 for field in packed[0].fields)
    losses, _ = lora.trained(model.train(), seeds=[0] * 4)
    assert losses[-1] < losses[0]


@frozen
def test_a_new_model_with_adapters(frozen_weights: str | None) -> None:
    def made() -> Any:
        torch.manual_seed(5)
        return outcore.from_config(
            lora.config(), adapters=lora.lora(), device="cpu", frozen_weights=frozen_weights
        )

    model = made()
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    assert not any(tensor.is_meta for tensor in state.values())
    for name, tensor in state.items():
        if "lora_B" in name:
            assert not tensor.any(), name  # as PEFT starts them: the model begins as its base
        elif "lora_A" in name or "base_layer.weight" in name:
            assert 0.001 < float(tensor.std()) < 0.5, name
        elif "norm" in name:
            assert bool((tensor == 1).all()), name
    again = made().state_dict()
    assert all(torch.equal(again[name].float(), tensor) for name, tensor in state.items())
    losses, _ = lora.trained(model, seeds=[0] * 4)
    assert losses[-1] < losses[0]


def test_fused_experts_under_adapters() -> None:
    """PEFT adds to the stacked weights themselves, inside the block's forward."""

    def trained(**options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = outcore.from_config(
            MIXTRAL, adapters=lora.lora(), device="cpu", frozen_weights="int4", **options
        )
        packed = next(unit.packed for unit in engine_of(model).units if unit.packed is not None)
        assert [f.name.split(".")[-1] for f in packed.fields if len(f.shape) == 3] == [
            "gate_up_proj",
            "down_proj",
        ]
        return lora.trained(model)

    losses, adapters = trained(weights="host")
    other_losses, other_adapters = trained(weights="device", activations="keep")
    assert other_losses == losses
    assert all(torch.equal(other_adapters[name], adapters[name]) for name in adapters)
    assert any("experts" in name for name in adapters)
    plain, adapted = (model_spec(MIXTRAL, adapters=a) for a in (None, lora.lora()))
    kept = plain.blocks[0].kept_elements_per_token + 4 * 4  # of attention's four adapters
    assert adapted.blocks[0].kept_elements_per_token == kept


@pytest.mark.parametrize("is_ours", [False, True])
def test_patterns_are_said_to_be_ignored_only_where_they_are(is_ours: bool) -> None:
    """For the experts of Mixtral PEFT adds some of its own, and finds no module for them."""
    with torch.device("meta"):
        base = hf.AutoModelForCausalLM.from_config(MIXTRAL)
    given = {"rank_pattern": {"nothing": 4}} if is_ours else {}
    adapters = lora.peft.LoraConfig(r=8, target_modules="all-linear", **given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model: Any = with_adapters_on_meta(base, adapters)
    said = [str(each.message) for each in told if "did not match any" in str(each.message)]
    assert any("nothing" in words for words in said) == is_ours
    assert is_ours or said == []
    experts = model.base_model.model.model.layers[0].mlp.experts
    ranks = {p.shape[0] for name, p in experts.named_parameters() if "lora_A" in name}
    assert ranks == {8 * 8, 2 * 8 * 8}, "the pattern of gate_up_proj counts: twice as many"


def test_adapters_come_as_peft_draws_them() -> None:
    with torch.device("meta"):
        base = hf.AutoModelForCausalLM.from_config(lora.config())
    names = {id(p): name for name, p in base.named_parameters()}
    torch.manual_seed(0)
    model = with_adapters(base, lora.lora())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.requires_grad
            assert not parameter.is_meta
            assert parameter.is_contiguous()
            assert bool(parameter.any()) == ("lora_A" in name)
        else:  # the same objects as before
            assert parameter.is_meta
            assert not parameter.requires_grad
            assert id(parameter) in names


def test_without_adapters_a_packed_model_is_born_frozen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(lora.config()).save_pretrained(tmp_path)
    model = outcore.load(tmp_path, device="cpu", frozen_weights="int4")
    assert not any(p.requires_grad for p in model.parameters())
    tokens = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 7)
    new = outcore.from_config(lora.config(), device="cpu", frozen_weights="int8")
    assert not any(p.requires_grad for p in new.parameters())
    new(**lora.batch())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_adapters_that_need_the_weights_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.*outcore.offload"):
        outcore.from_config(lora.config(), adapters=lora.lora(**changes), device="cpu")


def test_adapters_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="LoraConfig, not dict"):
        outcore.from_config(lora.config(), adapters={"r": 4}, device="cpu")


_PEAK = """
import resource, sys
import torch, transformers as hf
import lora, outcore
from outcore.engine.offload import engine_of

config = lora.config(hidden_size=384, intermediate_size=1152, num_hidden_layers=20)
outcore.from_config(lora.config(), adapters=lora.lora(), device="cpu", frozen_weights="int4")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = outcore.from_config(
    config, adapters=lora.lora(), device="cpu", frozen_weights="int4", num_slots=1
)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
engine = engine_of(model)
block = max(4 * (u.packed.expanded.numel + u.layout.numel) for u in engine.units if u.packed)
books = sum(sum(l.taken().values()) for l in (engine.host_ledger, engine.device_ledger))
whole = sum(4 * p.numel() for p in model.parameters())
print(1024 * (after - before), books, block, whole)
"""


def test_the_whole_base_never_exists_beside_its_packed_form() -> None:
    """Peak host memory above what is in the books: about two blocks, far from the base."""
    ran = subprocess.run(
        [sys.executable, "-c", _PEAK],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        # What is freed goes back at once, and is not kept for the next block.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    grown, books, block, whole = (int(word) for word in ran.stdout.split())
    assert block * 18 < whole
    adapters = 15_000_000  # their own values before they move in, and their modules
    assert grown < books + 2 * block + adapters, ran.stdout
    assert grown < whole


@pytest.mark.parametrize("homes", [("host", "host"), ("device", "host"), ("disk", "disk")])
@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("use_dora", [False, True])
def test_merged_adapters_count(
    homes: tuple[str, str], num_slots: int, use_dora: bool, tmp_path: Path
) -> None:
    """PEFT writes the base without telling, DoRA in other memory; copies and records follow."""
    import peft

    def make() -> Any:
        torch.manual_seed(0)
        base = hf.LlamaForCausalLM(lora.config())
        config = lora.lora(use_dora=use_dora)
        return lora.moved_adapters(peft.get_peft_model(base, config)).eval()

    ids = torch.randint(0, lora.VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    plain = make()
    weights, state = homes
    model = outcore.offload(
        make(), device="cpu", weights=weights, state=state, num_slots=num_slots, disk=tmp_path
    )
    optimizer = outcore.AdamW(model)

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return model(input_ids=ids).logits + 0, plain(input_ids=ids).logits

    torch.testing.assert_close(*logits())
    saved = model.state_dict()  # of the homes
    for name in ("merge_adapter", "unmerge_adapter", "merge_adapter"):
        for each in (model, plain):
            getattr(each, name)()
        torch.testing.assert_close(*logits())
        torch.testing.assert_close(saved, plain.state_dict())
        for each in (model, plain):
            layer = each.base_model.model.model.layers[1].self_attn.q_proj
            with torch.no_grad():  # into the home again
                layer.get_base_layer().weight.mul_(0.9)
        torch.testing.assert_close(*logits())
    with pytest.raises(outcore.OutcoreError, match="unmerge_adapter"), model.disable_adapter():
        model(input_ids=ids)
    with pytest.raises(outcore.OutcoreError, match="safe_merge"):
        model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    plain.unmerge_adapter()
    torch.testing.assert_close(*logits())
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    outcore.release(model)
    assert "merge" not in vars(model.base_model.model.model.layers[0].self_attn.q_proj)


def test_an_adapter_that_is_merged_before_another_one_fails_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT merges one after the other, and what is in the weights stays there."""
    ids = torch.arange(8)[None]
    model = lora.plain_model().eval()
    model.add_adapter("other", lora.lora())
    model = outcore.offload(model, device="cpu", weights="disk", disk=tmp_path)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids).logits + 0

    before = logits()
    delta = layer.get_delta_weight

    def failing(name: str) -> torch.Tensor:
        if name == "other":
            raise torch.OutOfMemoryError
        return delta(name)

    monkeypatch.setattr(layer, "get_delta_weight", failing)
    with pytest.raises(torch.OutOfMemoryError):
        layer.merge(adapter_names=["default", "other"])
    assert layer.merged_adapters == ["default"]
    torch.testing.assert_close(logits(), before)
    outcore.release(model)


def test_a_packed_base_takes_no_adapters_in() -> None:
    """Its parameters have no memory: merged, the adapters would be nowhere."""
    ids = torch.arange(8)[None]
    model = outcore.offload(lora.plain_model().eval(), device="cpu", frozen_weights="int8")
    with torch.no_grad():
        before = model(input_ids=ids).logits + 0
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(outcore.OutcoreError, match="release"):
                merge()
        assert torch.equal(model(input_ids=ids).logits + 0, before)
    outcore.release(model)
    model.merge_adapter()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("trains", [True, False])
def test_adapters_added_after_offload_are_refused_with_the_remedy(trains: bool) -> None:
    model = lora.offloaded(hf.AutoModelForCausalLM.from_config(lora.config()), None)
    late = lora.peft.get_peft_model(model, lora.lora())
    with (
        torch.set_grad_enabled(trains),
        pytest.raises(outcore.OutcoreError, match="adapters first"),
    ):
        late(**lora.batch())
