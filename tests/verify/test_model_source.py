"""Models to verify: found, cut to fewer layers, and made the same each time."""

from pathlib import Path

import pytest
import torch
from hub_cache import link_snapshot, offline_cache, put_snapshot
from transformers import LlamaConfig, LlamaForCausalLM

from outcore.shapes import shape_names
from outcore.verify import find_model


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt-oss-20b", "qwen2.5-7b", "smollm2-135m"])
def test_fewer_layers_are_fewer_parameters(name: str) -> None:
    whole, cut = find_model(name), find_model(name, num_layers=2)
    assert cut.num_layers == 2
    assert cut.num_parameters() < whole.num_parameters()
    assert whole.num_layers > 2, "the source that it was cut from is as it was"


def test_the_layers_that_fit_do_fit_and_one_more_does_not() -> None:
    source = find_model("qwen2.5-7b")
    num_bytes = find_model("qwen2.5-7b", num_layers=5).resident_bytes()
    assert source.layers_that_fit(num_bytes) == 5
    assert source.layers_that_fit(num_bytes - 1) == 4
    assert source.layers_that_fit(1) == 0
    assert source.layers_that_fit(10**15) == source.num_layers


def test_the_same_seed_makes_the_same_model() -> None:
    source = find_model("smollm2-135m", num_layers=2)
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(source.make("cpu").state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_unknown_name_lists_the_shapes() -> None:
    with pytest.raises(ValueError, match="neither a directory, nor an id of the Hub") as error:
        find_model("qwen")
    assert all(name in str(error.value) for name in shape_names())


def test_weights_of_the_hub_are_asked_for_after_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = put_snapshot(offline_cache(tmp_path / "hub", monkeypatch), "some-org/small")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=3, **sizes))
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "config.json").rename(blobs / "config.json")
    snapshot = link_snapshot(blobs)
    source = find_model("some-org/small", num_layers=2)
    assert source.resident_bytes() > 0
    with pytest.raises(ValueError, match="some-org/small"):
        source.fetched()
    weights = tmp_path / "whole" / "model.safetensors"
    (snapshot / weights.name).symlink_to(weights)
    made = source.make("cpu").state_dict()
    assert max(int(name.split(".")[2]) for name in made if ".layers." in name) == 1
    assert all(torch.equal(made[name], model.state_dict()[name]) for name in made)
